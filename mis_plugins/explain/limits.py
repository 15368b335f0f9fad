"""Where a number of the mismatch turns bad, and which preset each kl_k3 takes: one record for report and pages.

Tests hold README.md, docs/choose.md and docs/metrics.md to it.
"""

import math
from dataclasses import dataclass

FIRST = "kl_k3"  # stands first on every page


@dataclass(frozen=True)
class Limits:
    """A number's limits.

    low, high: where the number turns bad.
    alarm: where the number alone is an alarm.
    least, most: what the number can be at all; what lies outside measures nothing.
    """

    low: float = -math.inf
    high: float = math.inf
    alarm: float = math.inf
    least: float = 0.0
    most: float = math.inf


LIMITS: dict[str, Limits] = {
    FIRST: Limits(high=1e-2, alarm=5e-2),
    "ratio_mean": Limits(0.98, 1.02),
    "log_prob_diff_abs_max": Limits(high=5.0),
    "ess_ratio": Limits(low=0.5, most=1.0),
    "ess": Limits(low=0.5, most=1.0),
    "prob_correlation": Limits(low=0.95, least=-1.0, most=1.0),
    "kept_fraction": Limits(low=0.5, most=1.0),
}


@dataclass(frozen=True)
class Row:
    """A row of README's table of presets, whose rows are ordered by kl_k3.

    below: the kl_k3 that ends the row.
    """

    below: float
    preset: str


ROWS = (Row(LIMITS[FIRST].high, "metrics-only"), Row(LIMITS[FIRST].alarm, "tis"), Row(0.25, "geometric-mis-wide"))
UNBIASED = 0.5  # kl_k3 times tokens of a response, below which `sequence` has little noise


def row(kl_k3: float) -> Row | None:
    """README's row for a kl_k3; None above all rows, where docs/choose.md says to repair the engine first."""
    return next((candidate for candidate in ROWS if kl_k3 < candidate.below), None)
