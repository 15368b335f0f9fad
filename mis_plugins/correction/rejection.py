"""Rejection: which tokens, segments and sequences stay in the loss.

A statistic that is not known (a non-finite log-prob) satisfies no rule.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import Over, RejectRule
from mis_plugins.correction.ratios import exp_clamped, within
from mis_plugins.terms.statistics import row_of


class Totals(dict[str, Tensor]):
    """What each unit adds up to, by the names of `correction/totals.py`, and what follows from that, computed once.

    A unit is a sequence, or a segment of one.
    """

    @cached_property
    def size(self) -> Float[Tensor, " N"]:
        """How many valid tokens a mean is taken over; 1 where there are none."""
        return self["valid"].clamp(min=1)

    @cached_property
    def mean_log_ratio(self) -> Float[Tensor, " N"]:
        return self["log_ratio"] / self.size

    @cached_property
    def ratio(self) -> Float[Tensor, " N"]:
        """Ratio of the whole unit, with its log clamped; 0 where it is not known."""
        return torch.where(self.known, exp_clamped(self["log_ratio"]), 0)

    @cached_property
    def mean_ratio(self) -> Float[Tensor, " N"]:
        """Geometric mean of the unit's ratios, with its log clamped; 0 where the unit is not known."""
        return torch.where(self.known, exp_clamped(self.mean_log_ratio), 0)

    @cached_property
    def ratio_min(self) -> Float[Tensor, " N"]:
        """Smallest ratio of the unit's tokens, with its log clamped."""
        return exp_clamped(self["log_ratio_min"])

    @cached_property
    def seen(self) -> Bool[Tensor, " N"]:
        """Units with a usable token."""
        return self["usable"] > 0

    @cached_property
    def known(self) -> Bool[Tensor, " N"]:
        """Units with a valid token, all of whose log ratios are finite."""
        return (self["valid"] > 0) & (self["usable"] == self["valid"])


EXTREME: dict[Over, str] = {"min": "_min", "max": "_max"}


def total_of(rule: RejectRule) -> str:
    """The name of the total that a rule over a unit reads."""
    return row_of(rule.statistic) + EXTREME.get(rule.over, "")


def aggregate(totals: Totals, rule: RejectRule) -> Float[Tensor, " N"]:
    """Value of each unit that the rule compares. A unit without a valid token may have any value."""
    if rule.over != "mean":
        return totals[total_of(rule)]
    return totals.mean_log_ratio if total_of(rule) == "log_ratio" else totals[total_of(rule)] / totals.size


def passes(statistic: Tensor, rule: RejectRule, keep: Bool[Tensor, " *"]) -> Bool[Tensor, " *"]:
    """`keep`, less what the rule drops."""
    return keep & within(statistic, *rule.limits)
