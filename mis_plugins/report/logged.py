"""The numbers that a host itself logs for each optimizer step: means over responses, micro-batch by micro-batch.

A host divides what the TIS hook returns by responses, and not by tokens (but for `--calculate-per-token-loss`), so that
short responses count as much as long ones. Only a dump tells the micro-batches, which weights are normalized over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.metrics.token_metrics import diagnose
from mis_plugins.report.batches import Batch
from mis_plugins.report.numbers import corrected
from mis_plugins.report.record import Record

PREFIX = "mis_"
OF_HOST = "train_rollout_logprob_abs_diff"  # Miles's and slime's own number: only kept tokens add to it
# Numbers that follow from the mean weight of the scope.
NORMALIZED = frozenset(
    """mis_batch_norm_factor mis_is_ratio_mean_final mis_is_ratio_min_final mis_is_ratio_max_final mis_weight_max_mb
    mis_weight_min_mb""".split()
)
OF_DASHBOARD = "mean_abs_lp_diff"  # of Miles's dashboard, over responses with a valid token


@dataclass
class Logged:
    """Sums of each optimizer step of each rollout. Responses of a micro-batch are held until the next one begins."""

    config: CorrectionConfig
    held: list[Record] = field(default_factory=list)
    sums: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)

    def add(self, records: Sequence[Record]) -> None:
        for record in records:
            if self.held and _place(record) != _place(self.held[0]):
                self.close()
            if record.packing is not None:
                self.held.append(record)

    def close(self) -> None:
        """Add the micro-batch that is held."""
        if not self.held:
            return
        packings = [record.packing for record in self.held if record.packing is not None]
        batch = Batch(self.held[0].step, tuple(self.held))
        divisors = torch.tensor([max(packing.valid, 1.0) for packing in packings], dtype=torch.float64)
        total = self.sums.setdefault((batch.step, packings[0].optimizer_step), {})
        for name, value in _sums(batch, self.config, divisors).items():
            total[name] = total.get(name, 0.0) + value
        total["rollouts"] = packings[0].rollouts
        self.held = []

    def numbers(self) -> list[dict[str, float]]:
        """Numbers of each optimizer step by the host's name, with the numbers of its rollout and of the step in it."""
        self.close()
        return [
            {"step": step, "optimizer_step": number} | _means(self.sums[step, number])
            for step, number in sorted(self.sums)
            if self.sums[step, number]["rollouts"] > 0
        ]


def _place(record: Record) -> tuple[object, ...]:
    packing = record.packing
    return (record.step, *((packing.optimizer_step, packing.micro_batch) if packing else ()))


def _sums(batch: Batch, config: CorrectionConfig, divisors: Float[Tensor, " N"]) -> dict[str, float]:
    """Sums over the responses of a micro-batch of their means, as the host divides them."""
    correction, mask = corrected(batch, config), batch.ragged.loss_mask
    left_out = NORMALIZED if _normalizes_wider(config) else frozenset()
    rows = {
        name: row for name, row in diagnose(correction, PREFIX, "sequences").items() if name not in left_out
    }
    size = (batch.proximal - batch.behavior).abs()
    rows |= {OF_HOST: torch.where(correction.keep, size, 0), OF_DASHBOARD: size}
    valid, *totals = batch.ragged.sums(mask, *(torch.where(mask, row, 0) for row in rows.values()))
    found = {name: float((row / divisors).sum()) for name, row in zip(rows, totals, strict=True)}
    of_dashboard = (totals[-1] / valid)[valid > 0]
    return found | {OF_DASHBOARD: float(of_dashboard.sum()), "with_valid": float(of_dashboard.numel())}


def _normalizes_wider(config: CorrectionConfig) -> bool:
    """Whether the mean weight is of more than one micro-batch, which one micro-batch does not tell."""
    normalize = config.weight.normalize if config.weight else None
    return normalize is not None and normalize.scope != "micro_batch"


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    found = {
        name: value / sums["rollouts"]
        for name, value in sums.items()
        if name not in ("with_valid", "rollouts")
    }
    return found | {OF_DASHBOARD: sums[OF_DASHBOARD] / max(sums["with_valid"], 1.0)}
