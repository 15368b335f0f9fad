"""Sampling from a nucleus: the micro-batch that slime hands its losses where `--rollout-top-p` is below 1.

The log-probs of every policy are over the kept set, and the sets travel beside them under slime's keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lab.parity.cases import Batch

IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"


def cut(batch: Batch, top_p: float) -> tuple[Batch, dict[str, list[Tensor]]]:
    """Renormalize a batch's log-probs over the nuclei of its logits, and return the nuclei."""
    rows = list(_response_logits(batch))
    kept = [_nucleus(logits, top_p) for logits in rows]
    forced = [row.scatter(1, tokens[:, None], True) for row, tokens in zip(kept, _responses(batch), strict=True)]
    mass = [
        logits.log_softmax(-1).masked_fill(~row, -torch.inf).logsumexp(-1)
        for logits, row in zip(rows, forced, strict=True)
    ]
    policies = {
        name: [x - m for x, m in zip(getattr(batch, name), mass, strict=True)]
        for name in ("proximal", "behavior", "reference")
    }
    ids = [row.nonzero()[:, 1].int() for row in kept]
    offsets = [torch.cat([torch.zeros(1), row.sum(1).cumsum(0)]).int() for row in kept]
    return replace(batch, **policies), {IDS: ids, OFFSETS: offsets}


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Mark the likeliest tokens of each row, up to the token with which their mass exceeds `top_p`."""
    probabilities, order = logits.softmax(-1).sort(-1, descending=True)
    inside = probabilities.cumsum(-1) - probabilities <= top_p
    return torch.zeros_like(inside).scatter(1, order, inside)


def _response_logits(batch: Batch) -> Iterator[Tensor]:
    """Yield the logits that score the response of each sequence."""
    for logits, response in zip(batch.logits, batch.response_lengths, strict=True):
        yield logits[len(logits) - response - 1 : -1]


def _responses(batch: Batch) -> Iterator[Tensor]:
    for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
        yield tokens[len(tokens) - response :]
