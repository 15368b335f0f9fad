"""The KL term of the policy loss, under the hosts' flags."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mis_plugins.divergence import k1, k2, k3

KL_LIMIT = 10.0
"""Where ``low_var_kl`` clamps its result, as in Miles."""


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}
"""By ``--kl-loss-type``, of log reference - log target."""


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
