"""The KL term of the policy loss, under the hosts' flags."""

from __future__ import annotations

from torch import Tensor

from mis_plugins.loss.objective import ESTIMATORS, LOW_VAR_KL_BOUND, KlType


def kl_term(kind: KlType, target: Tensor, reference: Tensor, ratio: Tensor | None) -> Tensor:
    """KL a token, with gradient through the target policy.

    Args:
        ratio: target over proximal policy, for ``--use-unbiased-kl``. DeepSeek-AI 2025, "DeepSeek-V3.2",
            arxiv.org/abs/2512.02556, section 3.1.
    """
    value = ESTIMATORS[kind](reference - target)
    if ratio is not None:
        value = ratio * value
    return value.clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND) if kind == "low_var_kl" else value
