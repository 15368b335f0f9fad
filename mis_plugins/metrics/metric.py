"""A metric of one optimizer step, with the words that `docs/metrics.md` has for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PREFIX, STEP_KEY = (
    "train/mis_step/",
    "train/step",
)  # prefix of the metrics in a host's log, and the host's key for the number of the step


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics that differ in their place: a percentile, a rule, an age.

    value: a function of the step's totals and of the place; NaN where the metric cannot be known.
    what: what the metric is.
    range: which values are possible.
    bad: which values tell of a problem.
    do: what to do about the problem.
    """

    value: Callable[..., float]
    what: str
    range: str
    bad: str
    do: str
