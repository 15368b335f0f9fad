"""Log-probs of the responses from a model's logits, and the helper through which a custom loss asks for them.

A kept set is the tokens that top-p or top-k left the engine to sample a token of a response from. Engine and trainer
both renormalize over it, so that both give log-probs under the distribution that was sampled from.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch import Tensor

from lab.host.train.batch import Layout, pack
from mis_plugins.errors import InputError

IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
"""Names of the kept sets in a sample and in the rollout data, as in slime."""


@dataclass(frozen=True)
class KeptSets:
    """The kept sets of one response.

    ids: token ids, set after set.
    offsets: where each set begins in `ids`, and where the last one ends.
    """

    ids: Tensor
    offsets: Tensor


def kept_sets(data: Mapping[str, Any]) -> list[KeptSets] | None:
    """The kept sets of each sample from the two lists in rollout data; None where nothing was cut."""
    if data.get(IDS) is None or data.get(OFFSETS) is None:
        return None
    return [KeptSets(*sets) for sets in zip(data[IDS], data[OFFSETS], strict=True)]


def kept_columns(layout: Layout, kept: Sequence[KeptSets], first: int, width: int) -> Bool[Tensor, "R W"]:
    """Which of the tokens `first` to `first + width` are in each scored token's kept set, itself included.

    Raises:
        InputError: a response has another number of kept sets than tokens.
    """
    sizes = [sets.offsets.long().diff() for sets in kept]
    for sample, (found, length) in enumerate(zip(sizes, layout.response_lengths, strict=True)):
        if len(found) != length:
            raise InputError(f"{OFFSETS} of sample {sample}: {len(found)} kept sets for {length} response tokens")
    ids = torch.cat([sets.ids.long() for sets in kept])
    row = torch.repeat_interleave(torch.cat(sizes))
    return (_members(row, ids - first, sum(map(len, sizes)), width))[layout.response_index] | _members(
        torch.arange(len(layout.targets)), layout.targets - first, len(layout.targets), width
    )


def _members(row: Tensor, column: Tensor, rows: int, width: int) -> Bool[Tensor, "N W"]:
    """A table with the given entries set; columns of other ranks are left out."""
    table, here = torch.zeros(rows, width, dtype=torch.bool), (column >= 0) & (column < width)
    table[row[here], column[here]] = True
    return table


def response_log_probs(
    logits: Tensor, layout: Layout, args: Namespace, kept: Sequence[KeptSets] | None = None
) -> Tensor:
    """`[R]` log-probs of the response tokens scored on this rank, float32, with gradient.

    By Megatron's cross entropy, or with `--true-on-policy` by the formula of the engines: the two round differently.

    Args:
        logits: `[1, S, V / tp]`, of this rank's slots and of its part of the vocabulary.
        kept: the kept sets of each response; None scores tokens over the whole vocabulary.
    """
    # The cross entropy overwrites its input; the division makes it a copy.
    scored = logits[0, layout.scored].float() / args.rollout_temperature
    if kept is not None:
        width = scored.shape[-1]
        columns = kept_columns(layout, kept, mpu.get_tensor_model_parallel_rank() * width, width)
        scored = scored.masked_fill(~columns, -torch.inf)
    if args.true_on_policy:
        log_probs = torch.log_softmax(scored, -1).gather(1, layout.targets[:, None])[:, 0]
    else:
        log_probs = -tensor_parallel.vocab_parallel_cross_entropy(scored, layout.targets)
    # A rank that scores nothing must still take part in the backward pass of the others.
    return log_probs + 0 * logits.sum() if log_probs.numel() == 0 else log_probs


def response_entropy(logits: Tensor, layout: Layout, temperature: float) -> Tensor:
    """`[R]` entropies, in nats, of the distributions that the response tokens were scored under."""
    scored = tensor_parallel.gather_from_tensor_model_parallel_region(logits[0, layout.scored])
    log_probs = torch.log_softmax(scored.float() / temperature, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    top_p_token_ids: Sequence[Tensor] | None = None,
    top_p_token_offsets: Sequence[Tensor] | None = None,
    **_: Any,
) -> dict[str, list[Tensor]]:
    """The hosts' function of this name: `log_probs` and, if asked, `entropy`, a CP-local tensor a sample.

    As in slime, log-probs are over the kept sets where they are given, and the entropy is that of the whole vocabulary.
    """
    cp = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    layout = pack(unconcat_tokens, response_lengths, *cp)
    kept = kept_sets({IDS: top_p_token_ids, OFFSETS: top_p_token_offsets})
    found = {"log_probs": response_log_probs(logits, layout, args, kept)}
    if with_entropy:
        found["entropy"] = response_entropy(logits, layout, args.rollout_temperature)
    return {name: list(values.split(layout.local_lengths)) for name, values in found.items()}
