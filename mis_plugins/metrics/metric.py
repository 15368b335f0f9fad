"""A number of one optimizer step, beside what `docs/metrics.md` says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PREFIX, STEP_KEY = (
    "train/mis_step/",
    "train/step",
)  # what a host logs them under, and beside which number of a step


@dataclass(frozen=True)
class Metric:
    """One number, or a family of numbers that differ in their place: a percentile, a rule, a lag.

    value: called with what the step added up to, and with the place; NaN where it cannot be known.
    what: what it is.
    range: what it can be.
    bad: what it is when something is wrong.
    do: what to do then.
    """

    value: Callable[..., float]
    what: str
    range: str
    bad: str
    do: str
