"""What a metric of an optimizer step is; `lab/pages/metrics.yaml` has the words that `docs/metrics.md` says of each."""

from __future__ import annotations

from collections.abc import Callable

# Prefix of the metrics in a host's log, and the host's key for the number of the step.
PREFIX, STEP_KEY = "train/mis_step/", "train/step"

Metric = Callable[..., float]
"""A function of a step's totals and of a place: a percentile, a rule, an age. NaN where it cannot be known."""
