"""The importance ratio between trainer and rollout engine, token by token and over whole sequences."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG_RATIO_CLAMP = 20.0  # e^20 = 4.9e8: far outside any bound in use, and its square is still a float32


def log_ratio(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """log pi_old(y_t) - log mu(y_t) in float32, and where it is known.

    A token is usable where loss_mask holds and both log-probs are finite; elsewhere its log ratio reads 0.
    """
    difference = proximal.float() - behavior.float()
    usable = loss_mask & finite(difference)
    return torch.where(usable, difference, 0), usable


def finite(x: Tensor) -> Bool[Tensor, " *"]:
    """Neither NaN nor infinite; isfinite() in a third of its time."""
    return x.abs() < torch.inf


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp, with its argument clamped to +-LOG_RATIO_CLAMP."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp_()


def below(log_ratio: Tensor, bound: float) -> Tensor:
    """Where the ratio is strictly below `bound`. Compared as logarithms, so that nothing overflows."""
    return log_ratio < math.log(bound)


def above(log_ratio: Tensor, bound: float) -> Tensor:
    """Where the ratio is strictly above `bound`."""
    return log_ratio > math.log(bound)
