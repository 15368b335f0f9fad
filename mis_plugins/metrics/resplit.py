"""The metrics of the trainer against itself: equal tokens, equal weights, other micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mis_plugins.metrics.metric import Metric
from mis_plugins.metrics.step import ratio_of


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
    "resplit_differs": Metric(
        lambda s: ratio_of(s.differing, s.tokens),
        "Share of valid tokens whose trainer log-prob differs in any bit at another micro-batch split.",
        range="0 to 1; exactly 0 where the trainer's kernels do not depend on the batch.",
        bad="above 0: log-probs of the log-prob pass and of the update differ by themselves, at equal weights.",
        do="compare resplit_diff_abs_mean with log_prob_diff_abs_mean, which no engine can bring below it; pin "
        "batch-invariant kernels (docs/engines.md), or give both passes the same micro-batches.",
    ),
    "resplit_diff_abs_mean": Metric(
        lambda s: ratio_of(s.apart, s.tokens),
        "Mean over valid tokens of the size of the difference between the two passes' log pi_old.",
        range="0 and above.",
        bad="near log_prob_diff_abs_mean: most of the mismatch is the trainer's own.",
        do="as resplit_differs.",
    ),
    "resplit_diff_abs_max": Metric(
        lambda s: s.largest if s.tokens else math.nan,
        "Largest difference between the two passes' log pi_old of a valid token; infinite where one is NaN.",
        range="0 and above.",
        bad="above 0.1: clip and ratio of the first step move by it, though no weight has.",
        do="as resplit_differs.",
    ),
}


def resplit_metrics(tokens: float, differing: float, apart: float, largest: float) -> dict[str, float]:
    """Every known metric of two log-prob passes of a rollout, by name."""
    sums = Resplit(tokens, differing, apart, largest)
    found = {name: metric.value(sums) for name, metric in RESPLIT.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}
