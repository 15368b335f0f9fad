"""Rejection: which tokens and which sequences stay in the loss.

A statistic that is not known (a non-finite log-prob) satisfies no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config import RejectRule
from mis_plugins.ratios import above, below

Totals = Mapping[str, Float[Tensor, " N"]]

# The log of the ratio that a rule over a sequence looks at. A sequence without a valid token has any of them.
STATISTICS: dict[str, Callable[[Totals], Float[Tensor, " N"]]] = {
    "sum": lambda totals: totals["log_ratio"],
    "mean": lambda totals: totals["log_ratio"] / totals["valid"].clamp(min=1),
    "min": lambda totals: totals["log_ratio_min"],
    "max": lambda totals: totals["log_ratio_max"],
}


def passes(log_ratio: Tensor, rule: RejectRule, keep: Bool[Tensor, " *"]) -> Bool[Tensor, " *"]:
    """`keep`, less what the rule drops."""
    if rule.lower is not None:
        keep = keep & ~below(log_ratio, rule.lower)
    if rule.upper is not None:
        keep = keep & ~above(log_ratio, rule.upper)
    return keep
