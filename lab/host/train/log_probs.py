"""Log-probs of the responses from a model's logits, and the helper through which a custom loss asks for them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from torch import Tensor

from lab.host.train.batch import Layout, pack
from lab.host.train.kept_set import KeptSets, kept_columns, kept_sets


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
    kept = kept_sets(top_p_token_ids, top_p_token_offsets)
    found = {"log_probs": response_log_probs(logits, layout, args, kept)}
    if with_entropy:
        found["entropy"] = response_entropy(logits, layout, args.rollout_temperature)
    return {name: list(values.split(layout.local_lengths)) for name, values in found.items()}
