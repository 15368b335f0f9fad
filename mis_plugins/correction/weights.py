"""Importance weights: a ratio and what bounds it.

TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". MIS and geometric
masking: Liu, Li et al. 2025, "When Speed Kills Stability". IcePop: Ling Team 2025, "Every Step Evolves".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import Bound, WeightConfig
from mis_plugins.correction.ratios import log_bound, within


def truncate(ratio: Tensor, config: WeightConfig) -> Tensor:
    """TIS: min(r, upper)."""
    return ratio.clamp(max=config.ceiling)


def clip(ratio: Tensor, config: WeightConfig) -> Tensor:
    """CIS: min(max(r, lower), upper)."""
    return ratio.clamp(config.floor, config.ceiling)


def unbounded(ratio: Tensor, config: WeightConfig) -> Tensor:
    """r itself. Of `mask` (MIS, IcePop) and `zero`, what lies outside is dealt with where it is known which that is."""
    return ratio


BOUNDS: dict[Bound, Callable[[Tensor, WeightConfig], Tensor]] = {
    "none": unbounded,
    "truncate": truncate,
    "clip": clip,
    "mask": unbounded,
    "zero": unbounded,
}


def bounded_weight(
    ratio: Tensor, usable: Bool[Tensor, " *"], passing: Bool[Tensor, " *"], config: WeightConfig
) -> Tensor:
    """w = bound(r); 0 where the ratio is not known, and reads 0.

    passing: `usable`, and within a mask or zero bound.
    """
    weight = BOUNDS[config.bound](ratio, config)
    if config.bound == "zero":
        return torch.where(passing, weight, 0)
    return torch.where(usable, weight, 0) if config.bound == "clip" else weight


def in_bounds(log_ratio: Tensor, usable: Bool[Tensor, " *"], config: WeightConfig) -> Bool[Tensor, " *"]:
    """`usable`, and for a mask or zero bound lower <= r <= upper."""
    if not config.drops:
        return usable
    return usable & within(log_ratio, log_bound(config.floor), log_bound(config.ceiling))


def normalization(total: Float[Tensor, " 2"]) -> Float[Tensor, ""]:
    """The mean weight to divide by, from (sum of weights, count). 1 where there is nothing to normalize."""
    mean = total[0] / total[1].clamp(min=1)
    return torch.where(mean > 1e-8, mean, 1)
