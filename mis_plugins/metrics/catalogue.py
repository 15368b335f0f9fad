"""The metrics of one optimizer step, from its totals; most are made of one quantity and stand in its record.

`metrics/tokens.py` and `metrics/sequences.py` have these records; `lab/pages/metrics.yaml` has the words of each, for
`docs/metrics.md`. Notation: r_t = pi_old(y_t) / mu(y_t) is a token's ratio, trainer over rollout engine; w_t is its
bounded weight. Means over tokens are over usable tokens, means over sequences over sequences with a usable token. log r
is clamped at +-20 inside exp. A metric that cannot be known, such as a mean of nothing, is NaN and is not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.metrics.quantity import Step, known, log_of
from mis_plugins.metrics.tokens import OF_TURNS, rules
from mis_plugins.metrics.totals import Partials

METRICS: dict[str, Callable[[Step], float]] = {
    "live_sequences_fraction": lambda s: s.over("any_valid", "sequences"),
    "nonfinite_advantage_tokens": lambda s: (
        s.sums["nonfinite_advantages"] if s.sums["with_advantage"] else math.nan
    ),
    "prob_correlation": lambda s: s.correlation("proximal_prob", "behavior_prob", "prob_product"),
    "log_prob_correlation": lambda s: s.correlation("proximal", "behavior", "log_prob_product"),
    "slope": lambda s: s.related("slope"),
    "slope_error": lambda s: s.related("slope_error"),
    "ratio_mean_error": lambda s: s.related("mean_ratio_error"),
    "log_chi2_sequence": lambda s: s.log_products[2] - log_of(s.sums["any_usable"]),
    "log_mean_product": lambda s: s.log_products[1] - log_of(s.sums["any_usable"]),
    "normalization_factor": lambda s: s.over("weight", "normalized"),
    "all_rejected_fraction": lambda s: s.over("all_rejected", "micro_batches"),
    "loss_kept_denominator": lambda s: s.over("corrected_loss", "kept") if s.sums["with_loss"] else math.nan,
}
"""Metrics that are made of several quantities."""


def finalize(partials: Partials, config: CorrectionConfig) -> dict[str, float]:
    """Every known metric of a step from its merged partials, which should be on the host by now."""
    step = partials.step()
    found = {
        name: reduction.of(step, quantity, count)
        for quantity, metrics, count in partials.records
        for name, reduction in metrics.items()
    }
    found |= {name: metric(step) for name, metric in METRICS.items()}
    for name, _ in rules(config):
        found[f"{name}_rejected_fraction"] = found[f"{name}_low_fraction"] + found[f"{name}_high_fraction"]
    if not any(step.sums[f"{turn}usable"] for turn in OF_TURNS[1:]):
        found = {name: value for name, value in found.items() if not name.startswith("turn_")}
    return known(found)
