"""Estimators of KL(p || q) from one token that p sampled, given log r = log q - log p.

For the mismatch p is mu and q is pi_old. For the KL penalty p is pi_theta and q the reference policy, so that
the penalty's k1 is log pi_theta - log pi_ref. Schulman 2020, "Approximating KL Divergence".
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # torch is imported by whoever makes one

LOG_RATIO_CLAMP = 20.0  # e^20 = 4.9e8: far outside any bound in use, and its square is still a float32
# Largest exponent in numbers that only metrics show: a sum of thousands of e^80 = 5.5e34 still fits float32.
LARGEST_EXPONENT = 80.0


def k1(log_ratio: Tensor) -> Tensor:
    """-log r: unbiased, of any sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, at least 0."""
    return log_ratio.square().div_(2)


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, log r at most 20, so that nothing overflows: unbiased, at least 0."""
    bounded = log_ratio.clamp(max=LOG_RATIO_CLAMP)
    excess = bounded.expm1()
    # In place unless a backward will read it: on a CPU a new tensor costs as much as the subtraction.
    return excess - bounded if excess.requires_grad else excess.sub_(bounded)
