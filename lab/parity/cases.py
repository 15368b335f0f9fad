"""The questions of host_parity.py: points of the config product, and ragged micro-batches.

Where a batch is sampled from nuclei, as slime samples with `--rollout-top-p` below 1, the log-probs of every policy are
over the kept sets. The sets travel beside them under slime's keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
VETO = 1e-4
TIS_BOUNDS = {"token": (0.5, 2.0), "sequence": (0.3, 3.0), "geometric": (0.9, 1.1)}
RS_BOUNDS = {"token": (0.45, 2.5), "sequence": (0.2, 5.0), "geometric": (0.88, 1.15)}
IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"


@dataclass(frozen=True)
class Case:
    """A case is one point of the config product, in Miles's flat keys."""

    level: str = "token"
    mode: str = "truncate"
    rejection: str | None = None
    veto: bool = False
    normalize: bool = False
    inherit_bounds: bool = False
    use_tis: bool = True

    def flat_keys(self) -> dict[str, Any]:
        tis_lower, tis_upper = TIS_BOUNDS[self.level]
        rs_lower, rs_upper = (None, None) if self.inherit_bounds else RS_BOUNDS[self.rejection or "token"]
        return {
            "use_tis": self.use_tis, "use_rs": self.rejection is not None,
            "tis_level": self.level, "tis_mode": self.mode,
            "tis_lower_bound": None if self.inherit_bounds else tis_lower, "tis_upper_bound": tis_upper,
            "rs_level": self.rejection or "token", "rs_lower_bound": rs_lower, "rs_upper_bound": rs_upper,
            "rs_veto_threshold": VETO if self.veto else None, "tis_batch_normalize": self.normalize,
        }  # fmt: skip


def config_product() -> list[Case]:
    points = itertools.product(LEVELS, MODES, (None, *LEVELS), (False, True), (False, True), (False, True))
    return [Case(*point) for point in points]


@dataclass(frozen=True)
class Batch:
    """A micro-batch before any CP split; lists hold one tensor a sequence: logits [L, V], tokens [L], or [response]."""

    name: str
    logits: list[Tensor]
    tokens: list[Tensor]
    loss_masks: list[Tensor]
    proximal: list[Tensor]
    behavior: list[Tensor]
    advantages: list[Tensor]
    mask_sums: list[Tensor]
    reference: list[Tensor]

    @property
    def response_lengths(self) -> list[int]:
        return [len(mask) for mask in self.loss_masks]

    @property
    def total_lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]

    @property
    def has_dead_sequence(self) -> bool:
        return any(not mask.any() for mask in self.loss_masks)


Gap = Callable[[int], Tensor]


def make_batch(name: str, responses: list[int], mask_of: Callable[[int, Tensor], Tensor], gap: Gap, seed: int) -> Batch:
    """Draw a micro-batch; `gap(n)` draws n log ratios, proximal minus behavior."""
    torch.manual_seed(seed)
    prompts = [1 + int(torch.randint(9, ())) for _ in responses]
    logits = [torch.randn(p + r, 13) for p, r in zip(prompts, responses, strict=True)]
    tokens = [torch.randint(13, (p + r,)) for p, r in zip(prompts, responses, strict=True)]
    masks = [mask_of(i, torch.rand(r)) for i, r in enumerate(responses)]
    proximal = [_log_probs(x, t, r) + 0.05 * torch.randn(r) for x, t, r in zip(logits, tokens, responses, strict=True)]
    behavior = [p - gap(len(p)) for p in proximal]
    advantages = [torch.randn(()).expand(r).clone() for r in responses]
    reference = [p + 0.3 * torch.randn(len(p)) for p in proximal]
    sums = [m.sum() for m in masks]
    return Batch(name, logits, tokens, masks, proximal, behavior, advantages, sums, reference)


def _log_probs(logits: Tensor, tokens: Tensor, response: int) -> Tensor:
    start = len(tokens) - response
    chosen = tokens[start:].unsqueeze(-1)
    return logits[start - 1 : -1].log_softmax(-1).gather(-1, chosen).squeeze(-1)


def _noise(scale: float) -> Gap:
    return lambda n: scale * torch.randn(n)


def _with_catastrophes(n: int) -> Tensor:
    return 0.4 * torch.randn(n) - 11.0 * (torch.rand(n) < 0.03)


def _saturated(n: int) -> Tensor:
    return 0.4 * torch.randn(n) + 100.0 * (torch.rand(n) < 0.05) - 60.0 * (torch.rand(n) < 0.05)


def batches() -> list[Batch]:
    single_turn: Callable[[int, Tensor], Tensor] = lambda i, u: torch.ones_like(u)  # noqa: E731
    multi_turn: Callable[[int, Tensor], Tensor] = lambda i, u: (u > 0.3).int()  # noqa: E731
    dead_first: Callable[[int, Tensor], Tensor] = lambda i, u: (u > 0.2).float() * float(i not in (0, 3))  # noqa: E731
    ragged = [7, 1, 24, 12, 3, 18]
    return [
        make_batch("single turn, float mask", ragged, single_turn, _noise(0.4), seed=1),
        make_batch("multi turn, int mask", [30, 2, 11, 1, 16], multi_turn, _with_catastrophes, seed=2),
        make_batch("fully masked sequences", ragged, dead_first, _with_catastrophes, seed=3),
        make_batch("saturated ratios", [15, 9, 28, 4], multi_turn, _saturated, seed=4),
        make_batch("nearly on-policy", [40, 5, 17], single_turn, _noise(0.01), seed=5),
    ]


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
