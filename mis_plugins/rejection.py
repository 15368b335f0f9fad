"""Rejection: which tokens, segments and sequences stay in the loss.

A statistic that is not known (a non-finite log-prob) satisfies no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config import Over, RejectRule, Statistic

Totals = Mapping[str, Float[Tensor, " N"]]

EXTREME: dict[Over, str] = {"min": "_min", "max": "_max"}


def row_of(statistic: Statistic) -> str:
    """The name among the totals of what the statistic adds up to."""
    return "log_ratio" if statistic == "ratio" else statistic


def total_of(rule: RejectRule) -> str:
    """The name of the total that a rule over a unit reads."""
    return row_of(rule.statistic) + EXTREME.get(rule.over, "")


def aggregate(totals: Totals, rule: RejectRule) -> Float[Tensor, " N"]:
    """What the rule compares, of each unit. A unit without a valid token has any value."""
    value = totals[total_of(rule)]
    return value / totals["valid"].clamp(min=1) if rule.over == "mean" else value


def passes(statistic: Tensor, rule: RejectRule, keep: Bool[Tensor, " *"]) -> Bool[Tensor, " *"]:
    """`keep`, less what the rule drops."""
    lower, upper = rule.limits
    if lower is not None:
        keep = keep & ~(statistic < lower)
    if upper is not None:
        keep = keep & ~(statistic > upper)
    return keep
