"""Rejection: which tokens, segments and sequences stay in the loss. A unit is a segment or a sequence.

A statistic that is not known (a non-finite log-prob) satisfies no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import (
    LEVEL_OVER,
    CorrectionConfig,
    Over,
    Population,
    RejectRule,
    Unit,
    WeightConfig,
)
from mis_plugins.config.terms.statistics import row_of
from mis_plugins.correction.ratios import exp_clamped, log_bound


class Totals(dict[str, Tensor]):
    """Totals of each unit, by the names of `correction/sequence_totals.py`, and numbers derived from them."""

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
    def any_usable(self) -> Bool[Tensor, " N"]:
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


def unit_rules(config: CorrectionConfig, unit: Unit) -> list[RejectRule]:
    """Rules over units of this kind; rules over tokens are of neither kind."""
    return [rule for rule in config.reject if rule.over != "token" and rule.unit == unit]


def weight_of_units(config: CorrectionConfig, unit: Unit) -> WeightConfig | None:
    """The weight of units of this kind; None where the weight is of other units, or of tokens."""
    weight = config.weight
    weighs = weight is not None and (weight.by_segment if unit == "segment" else weight.by_sequence)
    return weight if weighs else None


def reads_kept(config: CorrectionConfig, unit: Unit) -> bool:
    """Whether a rule over units of this kind adds up the tokens that smaller units have kept."""
    return any(config.population(rule) == "kept" for rule in unit_rules(config, unit))


def within(x: Tensor, lower: float | None, upper: float | None) -> Bool[Tensor, " *"]:
    """lower <= x <= upper, and not NaN; None is no bound."""
    return x.clamp(lower, upper).eq_(x).bool()


def passes(statistic: Tensor, rule: RejectRule, keep: Bool[Tensor, " *"]) -> Bool[Tensor, " *"]:
    """`keep`, less what the rule drops."""
    return keep & within(statistic, *rule.limits)


def kept_tokens(
    keep: Bool[Tensor, " T"], config: CorrectionConfig, statistic: Callable[[str], Tensor]
) -> Bool[Tensor, " T"]:
    """`keep`, less what rules over tokens drop; `statistic` gives the values of tokens by the statistic's name."""
    for rule in config.reject:
        if rule.over == "token" and rule.drops:
            keep = passes(statistic(rule.statistic), rule, keep)
    return keep


def down_weights(config: CorrectionConfig, statistic: Callable[[str], Tensor]) -> Float[Tensor, " T"] | None:
    """What rules multiply the weight of each token by: 1 within their bounds. None where no rule down-weighs."""
    factors = [
        torch.where(within(statistic(rule.statistic), *rule.limits), 1.0, rule.down_weigh)
        for rule in config.reject
        if rule.down_weigh is not None
    ]
    return reduce(torch.mul, factors) if factors else None


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


def kept_units(
    by_population: Mapping[Population, Totals], config: CorrectionConfig, unit: Unit
) -> Bool[Tensor, " N"] | None:
    """Units of one kind that mask bound and rules keep; each rule reads its own population of tokens.

    The answer is None where neither a rule nor a bound can drop a unit of this kind.
    """
    keep = None
    for population, totals in by_population.items():
        rules = [rule for rule in unit_rules(config, unit) if config.population(rule) == population]
        weight = weight_of_units(config, unit) if config.weight_population == population else None
        kept = _kept(totals, rules, weight)
        if kept is not None:
            keep = kept if keep is None else keep & kept
    return keep


def _kept(
    totals: Totals, rules: Sequence[RejectRule], weight: WeightConfig | None
) -> Bool[Tensor, " N"] | None:
    """Known units that this weight's mask bound and these rules keep; None where there is neither."""
    masks = weight is not None and weight.record.drops_token
    if not rules and not masks:
        return None
    keep = passing_units(totals, weight) if masks and weight else totals.known
    for rule in rules:
        keep = passes(aggregate(totals, rule), rule, keep)
    return keep
