"""Importance weights: a ratio, of a token or of a unit, and its bound, which is a row of `terms/bounds.py`."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import LEVEL_OVER, WeightConfig
from mis_plugins.correction.rejection import Totals, passing_units, unit_log_ratio


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
    return totals.mean_ratio if LEVEL_OVER[weight.level] == "mean" else totals.ratio


def unit_weight(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """Bounded ratio of each unit; 0 where the unit is not known."""
    return bounded_weight(unit_ratio(totals, weight), totals.known, passing_units(totals, weight), weight)
