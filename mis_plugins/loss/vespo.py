"""VESPO: a soft weight of the sequence's ratio, a product over its tokens, in the place of PPO's clip.

Shen et al. 2026, "VESPO: Variational Sequence-Level Soft Policy Optimization", arxiv.org/abs/2602.10693.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import ObjectiveConfig
from mis_plugins.correction.ratios import exp_clamped, exp_finite
from mis_plugins.loss.objective import Clip, Operands, PolicyTerm, reinforce_surrogate
from mis_plugins.packing.ragged import Ragged


def soft_weight(
    log_ratio: Float[Tensor, " T"], advantages: Float[Tensor, " T"], config: ObjectiveConfig
) -> Float[Tensor, " T"]:
    """phi(s) = e^lambda s^k e^(-lambda s), with k and lambda by the sign of A: 1 at s = 1, and 0 far on both sides.

    Args:
        log_ratio: log s of the token's sequence, without gradient.
    """
    assert config.k_pos and config.lambda_pos and config.k_neg and config.lambda_neg
    ratio = exp_clamped(log_ratio)
    phi = lambda k, lam: exp_finite(lam + k * log_ratio - lam * ratio)  # noqa: E731
    return torch.where(advantages >= 0, phi(config.k_pos, config.lambda_pos), phi(config.k_neg, config.lambda_neg))


def vespo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """-sg(phi(prod_t r_t)) A log pi_theta; 0 in sequences of which a token's ratio is not known."""
    log_r = x.log_ratio.detach()
    usable, valid, total = ragged.sums(x.usable, ragged.loss_mask, log_r)
    known = ragged.loss_mask & ragged.to_tokens(usable == valid)
    weight = soft_weight(ragged.to_tokens(total.to(log_r.dtype)), x.advantages, x.config)
    loss = torch.where(known, x.factor * weight * reinforce_surrogate(x.target, x.advantages), 0)
    return PolicyTerm(loss, torch.zeros_like(log_r), log_r, known)


TERMS = {"token": vespo}
