"""The metrics of the trainer against itself: equal tokens, equal weights, other micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mis_plugins.metrics.quantity import Metric, ratio_of


@dataclass(frozen=True)
class Resplit:
    """Sums over the valid tokens of a rollout.

    tokens: how many there are.
    differing: how many have another log-prob in the second pass.
    apart: the sum of |difference|.
    largest: the largest |difference|.
    """

    tokens: float
    differing: float
    apart: float
    largest: float


RESPLIT: dict[str, Metric] = {
    "resplit_differs": lambda s: ratio_of(s.differing, s.tokens),
    "resplit_diff_abs_mean": lambda s: ratio_of(s.apart, s.tokens),
    "resplit_diff_abs_max": lambda s: s.largest if s.tokens else math.nan,
}


def resplit_metrics(tokens: float, differing: float, apart: float, largest: float) -> dict[str, float]:
    """Every known metric of two log-prob passes of a rollout, by name."""
    sums = Resplit(tokens, differing, apart, largest)
    found = {name: metric(sums) for name, metric in RESPLIT.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}
