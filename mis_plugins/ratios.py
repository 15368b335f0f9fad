"""The importance ratio between trainer and rollout engine, token by token and over whole sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG_RATIO_CLAMP = 20.0  # e^20 = 4.9e8: far outside any bound in use, and its square is still a float32


@dataclass(frozen=True)
class LogProbs:
    """Of the sampled tokens: trainer before the update (proximal), rollout engine (behavior)."""

    proximal: Float[Tensor, " T"]
    behavior: Float[Tensor, " T"]


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
    """Neither NaN nor infinite."""
    # As floats: a CPU writes those four times faster than bools, and narrows them in no time.
    return x.abs().lt_(torch.inf).bool()


def within(x: Tensor, lower: float | None, upper: float | None) -> Bool[Tensor, " *"]:
    """lower <= x <= upper, and not NaN; None is no bound."""
    return x.clamp(lower, upper).eq_(x).bool()


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp, with its argument clamped to +-LOG_RATIO_CLAMP."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp_()


def log_bound(bound: float) -> float:
    """The logarithm that a log ratio is compared with, so that nothing overflows; -inf for no lower bound."""
    return math.log(bound) if bound > 0 else -math.inf


def share_below(x: Tensor, bound: float) -> Tensor:
    """1 where x is strictly below the bound, else 0: to be averaged."""
    return torch.lt(x, bound, out=torch.empty_like(x))


def share_above(x: Tensor, bound: float) -> Tensor:
    """1 where x is strictly above the bound, else 0."""
    return torch.gt(x, bound, out=torch.empty_like(x))


def saturated(log_ratio: Tensor) -> Tensor:
    """1 where |log r|, of a token or of a sequence, exceeds the clamp: beyond it all ratios look alike."""
    return log_ratio.abs().gt_(LOG_RATIO_CLAMP)
