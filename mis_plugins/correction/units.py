"""The importance ratio and the weight of a unit: a sequence, or a segment of one. From the totals over its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import LEVEL_OVER, CorrectionConfig, Population, RejectRule, WeightConfig
from mis_plugins.correction.rejection import Totals, aggregate, passes
from mis_plugins.correction.weights import bounded_weight, in_bounds


def unit_log_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """log r of the whole unit: the sum, or its mean over the valid tokens."""
    return totals.mean_log_ratio if LEVEL_OVER[weight.level] == "mean" else totals["log_ratio"]


def known_log_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """log r of the whole unit; NaN where a valid token of the unit is unusable, so that no bound is exceeded."""
    return torch.where(totals.known, unit_log_ratio(totals, weight), torch.nan)


def unit_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """Ratio of the whole unit, or its geometric mean, with the log clamped; 0 where the unit is not known."""
    return totals.mean_ratio if LEVEL_OVER[weight.level] == "mean" else totals.ratio


def passing_units(totals: Totals, weight: WeightConfig) -> Bool[Tensor, " N"]:
    """Units that are known, and within a bound that gives no weight outside."""
    return in_bounds(unit_log_ratio(totals, weight), totals.known, weight)


def kept_units(
    totals: Totals, rules: Sequence[RejectRule], weight: WeightConfig | None
) -> Bool[Tensor, " N"] | None:
    """Units that the bound and rules over units keep; None where nothing of theirs drops a unit.

    Args:
        weight: the weight of such units; None where the weight is of other units.
    """
    masks = weight is not None and weight.record.drops_token
    if not rules and not masks:
        return None
    keep = passing_units(totals, weight) if masks and weight else totals.known
    for rule in rules:
        keep = passes(aggregate(totals, rule), rule, keep)
    return keep


def looks_at_kept(rules: Sequence[RejectRule], config: CorrectionConfig) -> bool:
    return any(config.population(rule) == "kept" for rule in rules)


def kept_by_population(
    units: Mapping[Population, Totals],
    config: CorrectionConfig,
    rules: Sequence[RejectRule],
    weight: WeightConfig | None,
) -> Bool[Tensor, " N"] | None:
    """Units that mask bound and rules keep, each judged by its own population of tokens; None where there is neither.

    Args:
        units: totals of the units by population of tokens.
    """
    keep = None
    for population, totals in units.items():
        mine = [rule for rule in rules if config.population(rule) == population]
        left = kept_units(totals, mine, weight if config.weight_population == population else None)
        if left is not None:
            keep = left if keep is None else keep & left
    return keep


def unit_weight(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """Bounded ratio of each unit; 0 where the unit is not known."""
    return bounded_weight(unit_ratio(totals, weight), totals.known, passing_units(totals, weight), weight)


def counted_units(totals: Totals, weight: WeightConfig) -> Bool[Tensor, " N"]:
    """Units that a mean of the weights is taken over: all known ones, less those that the bound drops."""
    return passing_units(totals, weight) if weight.record.drops_token else totals.known
