"""Importance weights: a ratio and its bound, which is a row of `terms/bounds.py`."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import WeightConfig
from mis_plugins.correction.ratios import log_bound, within


def applied_bound(ratio: Tensor, config: WeightConfig) -> Tensor:
    """bound(r), wherever the ratio lies."""
    return config.record.apply(ratio, config.floor, config.ceiling)


def bounded_weight(
    ratio: Tensor, usable: Bool[Tensor, " *"], passing: Bool[Tensor, " *"], config: WeightConfig
) -> Tensor:
    """w = bound(r); 0 where the ratio is not known, and reads 0.

    passing: `usable`, and within a bound that gives no weight outside.
    """
    weight = applied_bound(ratio, config)
    if config.record.zeroes:
        return torch.where(passing, weight, 0)
    return weight if config.record.keeps_zero else torch.where(usable, weight, 0)


def in_bounds(log_ratio: Tensor, usable: Bool[Tensor, " *"], config: WeightConfig) -> Bool[Tensor, " *"]:
    """`usable`, and lower <= r <= upper for a bound that gives no weight outside."""
    if config.record.weighs_outside:
        return usable
    return usable & within(log_ratio, log_bound(config.floor), log_bound(config.ceiling))


def normalization(total: Float[Tensor, " 2"]) -> Float[Tensor, ""]:
    """The mean weight to divide by, from (sum of weights, count). 1 where there is nothing to normalize."""
    mean = total[0] / total[1].clamp(min=1)
    return torch.where(mean > 1e-8, mean, 1)
