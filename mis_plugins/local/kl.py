"""The KL term of the policy loss, under the hosts' flags.

Estimators of KL(target || reference) from a token that the target policy sampled, x = log reference - log target.
Schulman 2020, "Approximating KL Divergence".
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Where ``low_var_kl`` clamps x, as in Miles."""

KL_LIMIT = 10.0
"""Where ``low_var_kl`` clamps its result, as in Miles."""


def k1(x: Tensor) -> Tensor:
    return -x


def k2(x: Tensor) -> Tensor:
    return x.square() / 2


def k3(x: Tensor) -> Tensor:
    return x.expm1() - x


def low_var(x: Tensor) -> Tensor:
    return k3(x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var}
"""By ``--kl-loss-type``."""


def kl_term(kind: str, target: Tensor, reference: Tensor, ratio: Tensor | None) -> Tensor:
    """KL a token, with gradient through the target policy.

    Args:
        ratio: target over proximal policy, for ``--use-unbiased-kl``. DeepSeek-AI 2025, "DeepSeek-V3.2",
            arxiv.org/abs/2512.02556, section 3.1.
    """
    value = ESTIMATORS[kind](reference - target)
    if ratio is not None:
        value = ratio * value
    return value.clamp(-KL_LIMIT, KL_LIMIT) if kind == "low_var_kl" else value
