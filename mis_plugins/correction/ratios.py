"""The importance ratio between trainer and rollout engine, token by token and over whole sequences."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.terms.divergence import LARGEST_EXPONENT, LOG_RATIO_CLAMP


def log_ratio(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """log pi_old(y_t) - log mu(y_t) in float32, and the usable tokens.

    A token is usable where loss_mask holds and both log-probs are finite; elsewhere its log ratio reads 0.
    """
    difference = proximal.float() - behavior.float()
    usable = loss_mask > nonfinite(difference)  # on bools a > b is a & ~b, in one kernel
    return difference.masked_fill_(~usable, 0), usable


def log_ratios(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    numerator: Float[Tensor, " T"] | None,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """The log ratio of rules, the log ratio of the weight, and the tokens where both are known.

    `numerator` holds log-probs of pi_{v+1}; it is None where the weight bounds pi_old / mu itself.
    """
    log_r, usable = log_ratio(proximal, behavior, loss_mask)
    if numerator is None:
        return log_r, log_r, usable
    weighed, usable = log_ratio(numerator, behavior, usable)
    return torch.where(usable, log_r, 0), weighed, usable


def finite(x: Tensor) -> Bool[Tensor, " *"]:
    """Neither NaN nor infinite: only a finite number less itself is 0."""
    return (x - x) == 0


def nonfinite(x: Tensor) -> Bool[Tensor, " *"]:
    """NaN or infinite: such a number less itself is NaN, which counts as true; a CPU compares four times slower."""
    return (x - x).bool()


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp, with its argument clamped to +-LOG_RATIO_CLAMP."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp_()


def exp_finite(x: Tensor) -> Tensor:
    """exp, its argument at most LARGEST_EXPONENT: a host multiplies by the mask, and 0 times infinity is NaN."""
    return x.clamp(max=LARGEST_EXPONENT).exp_()


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


def widened(x: Tensor) -> Tensor:
    """x as float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
