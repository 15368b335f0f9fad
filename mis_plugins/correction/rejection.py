"""Bounds and rules: what a ratio weighs, and which tokens, segments and sequences stay in the loss.

A unit is a segment or a sequence. A statistic that is not known (a non-finite log-prob) satisfies no rule. Bounds are
rows of `config/terms/bounds.py`.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import LEVEL_OVER, Population, RejectRule, WeightConfig
from mis_plugins.correction.plan import UnitPlan, total_of
from mis_plugins.correction.ratios import exp_clamped, log_bound


class Totals(dict[str, Tensor]):
    """Totals of each unit, by the names of `correction/plan.py`, and numbers derived from them."""

    @cached_property
    def size(self) -> Float[Tensor, " N"]:
        """How many valid tokens a mean is taken over; 1 where there are none."""
        return self["valid"].clamp(min=1)

    @cached_property
    def mean_log_ratio(self) -> Float[Tensor, " N"]:
        return self["log_ratio"] / self.size

    @cached_property
    def ratio_min(self) -> Float[Tensor, " N"]:
        """Smallest ratio of the unit's tokens, with its log clamped."""
        return exp_clamped(self["log_ratio_min"])

    @cached_property
    def any_usable(self) -> Bool[Tensor, " N"]:
        """Units with a usable token."""
        return self["usable"] > 0

    @cached_property
    def known(self) -> Bool[Tensor, " N"]:
        """Units with a valid token, all of whose log ratios are finite."""
        return self["usable"] == self.size


def within(x: Tensor, lower: float | None, upper: float | None) -> Bool[Tensor, " *"]:
    """lower <= x <= upper, and not NaN; None is no bound."""
    if upper is None:
        assert lower is not None
        return x >= lower
    return x <= upper if lower is None else x.clamp(lower, upper) == x


def passes(statistic: Tensor, rule: RejectRule, keep: Bool[Tensor, " *"]) -> Bool[Tensor, " *"]:
    """`keep`, less what the rule drops."""
    return keep & within(statistic, *rule.limits)


def in_bounds(log_ratio: Tensor, usable: Bool[Tensor, " *"], config: WeightConfig) -> Bool[Tensor, " *"]:
    """`usable`, and lower <= r <= upper for a bound that gives no weight outside."""
    if config.record.weighs_outside:
        return usable
    return usable & within(log_ratio, log_bound(config.floor), log_bound(config.ceiling))


def aggregate(totals: Totals, rule: RejectRule) -> Float[Tensor, " N"]:
    """Value of each unit that the rule compares. A unit without a valid token may have any value."""
    if rule.over != "mean":
        return totals[total_of(rule)]
    return totals.mean_log_ratio if total_of(rule) == "log_ratio" else totals[total_of(rule)] / totals.size


def unit_log_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """log r of the whole unit: the sum, or its mean over the valid tokens."""
    return totals.mean_log_ratio if LEVEL_OVER[weight.level] == "mean" else totals["log_ratio"]


def passing_units(totals: Totals, weight: WeightConfig) -> Bool[Tensor, " N"]:
    """Units that are known, and within a bound that gives no weight outside."""
    return in_bounds(unit_log_ratio(totals, weight), totals.known, weight)


def kept_units(by_population: Mapping[Population, Totals], plan: UnitPlan) -> Bool[Tensor, " N"] | None:
    """Units of a kind that mask bound and rules, each by its own population, keep; None where nothing can drop one."""
    keep = None
    for population, totals in by_population.items():
        rules, masks = plan.rules[population], plan.masks.get(population)
        if rules or masks:
            kept = totals.known if masks is None else passing_units(totals, masks)
            for rule in rules:
                kept = passes(aggregate(totals, rule), rule, kept)
            keep = kept if keep is None else keep & kept
    return keep


def applied_bound(ratio: Tensor, config: WeightConfig) -> Tensor:
    """bound(r), wherever the ratio lies."""
    return config.record.apply(ratio, config.floor, config.ceiling)


def bounded_weight(
    ratio: Tensor, usable: Bool[Tensor, " *"], passing: Bool[Tensor, " *"], config: WeightConfig
) -> Tensor:
    """w = bound(r), and 0 where the ratio is not known; an unknown ratio must read 0.

    passing: `usable`, and inside the bound where it gives no weight outside.
    """
    weight = applied_bound(ratio, config)
    if config.record.zeroes:
        return torch.where(passing, weight, 0)
    return weight if config.record.keeps_zero else torch.where(usable, weight, 0)


def known_log_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """log r of the whole unit; NaN where a valid token of the unit is unusable, so that no bound is exceeded."""
    return torch.where(totals.known, unit_log_ratio(totals, weight), torch.nan)


def unit_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """Ratio of the whole unit, or its geometric mean, with the log clamped; 0 where the unit is not known."""
    return torch.where(totals.known, exp_clamped(unit_log_ratio(totals, weight)), 0)


def unit_weight(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """Bounded ratio of each unit; 0 where the unit is not known."""
    return bounded_weight(unit_ratio(totals, weight), totals.known, passing_units(totals, weight), weight)
