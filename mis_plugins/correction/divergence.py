"""Estimators of KL(p || q) from one token that p sampled, of log r = log q - log p.

Of the mismatch p is mu and q is pi_old. Of the KL penalty p is pi_theta and q the reference policy, so that its k1 is
log pi_theta - log pi_ref. Schulman 2020, "Approximating KL Divergence".
"""

from __future__ import annotations

from torch import Tensor

from mis_plugins.correction.ratios import LOG_RATIO_CLAMP


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
