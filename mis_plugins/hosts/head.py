"""The tokens that the engine named beside each sampled one, from a host's micro-batch to `loss/centering.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from mis_plugins.config.model import CenterConfig
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.host import Batch
from mis_plugins.loss.centering import Candidates, Vocabulary
from mis_plugins.loss.micro_batch import Head
from mis_plugins.packing.layout import Layout
from mis_plugins.packing.ragged import Ranks, to_device

IDS, LOG_PROBS = (
    "rollout_topk_token_ids",
    "rollout_topk_log_probs",
)  # [response, k] of each sequence, on every rank
ABSENT = -1  # the id of an entry beyond what the engine named


def head_of(
    args: Any,
    batch: Batch,
    logits: Tensor,
    layout: Layout,
    cp: tuple[int, int],
    ranks: Ranks,
    config: CenterConfig,
) -> Head:
    """The candidates of this rank's tokens, and the logits that score them.

    Raises:
        ConfigError: --allgather-cp, or --true-on-policy-mode.
        InputError: the batch has no head, or one that does not fit; it names the key.
    """
    _check(args, batch, layout, config)
    width = _width(batch)
    ids = _local(batch[IDS], layout, width, logits.device).long()
    behavior = _local(batch[LOG_PROBS], layout, width, logits.device).float()
    behavior = torch.where(ids > ABSENT, behavior, -torch.inf)
    if width > config.top_k:
        behavior, likeliest = behavior.topk(config.top_k, -1)
        ids = ids.gather(-1, likeliest)
    tokens = [x[len(x) - n :] for x, n in zip(batch["unconcat_tokens"], layout.response_lengths, strict=True)]
    lengths = batch["total_lengths"], layout.response_lengths, batch.get("max_seq_lens")
    candidates = Candidates(
        rows=logit_rows(layout, *lengths, cp, logits.device),
        sampled=_joined(tokens, layout).to(logits.device),
        ids=ids.clamp(min=0),
        behavior=behavior,
        usable=torch.ones_like(ids[:, 0], dtype=torch.bool),
    )
    start = 0 if ranks.tp is None else ranks.tp.rank() * logits.shape[-1]
    temperature = getattr(args, "rollout_temperature", 1.0)
    return Head(logits, candidates, temperature, Vocabulary(start, ranks.tp))


def logit_rows(
    layout: Layout,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    padded_lengths: Sequence[int] | None,
    cp: tuple[int, int],
    device: torch.device,
) -> Int[Tensor, " T"]:
    """The row of this rank's logits that scores each of its response tokens: the position before the token.

    A sequence lies whole on the rank, or as two of `2 cp` chunks, one behind the other (`packing/layout.py`).
    """
    size, rank = cp
    numbers = (0,) if size == 1 else (rank, 2 * size - 1 - rank)
    shifts, lengths, offset, local = [], [], 0, 0
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        padded = total if padded_lengths is None else padded_lengths[i]
        chunk = padded if size == 1 else -(-padded // (2 * size))
        for number, (start, stop) in zip(numbers, layout.pieces(i), strict=True):
            shifts.append(offset + total - response - 1 + start - number * chunk - local)
            lengths.append(stop - start)
            offset, local = offset + chunk, local + stop - start
    table = to_device([*shifts, *lengths], device)
    return torch.arange(local, device=device) + table[: len(shifts)].repeat_interleave(
        table[len(shifts) :], output_size=local
    )


def _check(args: Any, batch: Batch, layout: Layout, config: CenterConfig) -> None:
    for flag in ("allgather_cp", "true_on_policy_mode"):
        if getattr(args, flag, False):
            raise ConfigError(
                f"mis.center: --{flag.replace('_', '-')} lays the logits out, or rounds them, otherwise than the head "
                "is read; drop one of them"
            )
    for name in (IDS, LOG_PROBS):
        if not batch.get(name):
            raise InputError(
                f"{name}: none in this micro-batch; mis.center needs the engine's likeliest tokens at each position: "
                f"let the host ask for them (Miles: --rollout-top-logprobs-num {config.top_k})"
            )
        for i, (rows, response) in enumerate(zip(batch[name], layout.response_lengths, strict=True)):
            if rows is None or len(rows) != response:
                found = "None" if rows is None else f"{len(rows)} positions"
                raise InputError(f"{name}[{i}]: {found}, but sequence {i} has {response} response tokens")
    if _width(batch) < 1 or any(len(rows) and len(rows[0]) != _width(batch) for rows in batch[IDS]):
        raise InputError(
            f"{IDS}: the number of tokens that the engine named differs between sequences, or is 0"
        )


def _width(batch: Batch) -> int:
    return next((len(rows[0]) for rows in batch[IDS] if len(rows)), 1)


def _local(
    responses: Sequence[Any], layout: Layout, width: int, device: torch.device
) -> Shaped[Tensor, "T K"]:
    """This rank's positions of [response, k] arrays."""
    return _joined([torch.as_tensor(x).reshape(-1, width) for x in responses], layout).to(device)


def _joined(responses: Sequence[Shaped[Tensor, "_ ..."]], layout: Layout) -> Shaped[Tensor, "T ..."]:
    """This rank's tokens of whole responses, in one tensor."""
    return torch.cat([x[start:stop] for i, x in enumerate(responses) for start, stop in layout.pieces(i)])
