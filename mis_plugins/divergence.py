"""Estimators of KL(mu || pi_old) from one token sampled by mu. Schulman 2020, "Approximating KL Divergence"."""

from __future__ import annotations

from torch import Tensor

from mis_plugins.ratios import LOG_RATIO_CLAMP


def k1(log_ratio: Tensor) -> Tensor:
    """log mu - log pi_old: unbiased, of any sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log r)^2 / 2, log r clamped at +-20: biased, at least 0."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).square_().div_(2)


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, log r clamped at +-20: unbiased, at least 0."""
    bounded = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return bounded.expm1().sub_(bounded)
