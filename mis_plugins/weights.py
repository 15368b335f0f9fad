"""Importance weights: a ratio and what bounds it.

TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". MIS and geometric
masking: Liu, Li et al. 2025, "When Speed Kills Stability". IcePop: Ling Team 2025, "Every Step Evolves".
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config import Bound, WeightConfig
from mis_plugins.ratios import above, below


def truncate(ratio: Tensor, config: WeightConfig) -> Tensor:
    """TIS: min(r, upper)."""
    return ratio.clamp(max=config.ceiling)


def clip(ratio: Tensor, config: WeightConfig) -> Tensor:
    """CIS: min(max(r, lower), upper)."""
    return ratio.clamp(config.floor, config.ceiling)


def mask(ratio: Tensor, config: WeightConfig) -> Tensor:
    """MIS, IcePop: r itself. What lies outside the bounds is dropped from the loss mask, see `in_bounds`."""
    return ratio


BOUNDS: dict[Bound, Callable[[Tensor, WeightConfig], Tensor]] = {
    "truncate": truncate,
    "clip": clip,
    "mask": mask,
}


def bounded_weight(ratio: Tensor, usable: Bool[Tensor, " *"], config: WeightConfig) -> Tensor:
    """w = bound(r); 0 where the ratio is not known, and reads 0."""
    weight = BOUNDS[config.bound](ratio, config)
    return torch.where(usable, weight, 0) if config.bound == "clip" else weight


def in_bounds(log_ratio: Tensor, config: WeightConfig) -> Bool[Tensor, " *"]:
    """lower <= r <= upper."""
    return ~(below(log_ratio, config.floor) | above(log_ratio, config.ceiling))


def normalization(total: Float[Tensor, " 2"]) -> Float[Tensor, ""]:
    """The mean weight to divide by, from (sum of weights, count). 1 where there is nothing to normalize."""
    mean = total[0] / total[1].clamp(min=1)
    return torch.where(mean > 1e-8, mean, 1)
