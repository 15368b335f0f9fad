"""Policy losses of single papers, which few configs ask for; the file is loaded where one does.

- GMPO: PPO's clip of each token's log ratio, and the geometric mean of what the clip leaves. Zhao et al. 2025,
  "Geometric-Mean Policy Optimization", arxiv.org/abs/2507.20673.
- SAPO: a soft gate of the ratio in the place of PPO's clip. Gao et al. 2025, "Soft Adaptive Policy Optimization",
  arxiv.org/abs/2511.20347.
- VESPO: a soft weight of the sequence's ratio, a product over its tokens, in the place of PPO's clip. Shen et al. 2026,
  "VESPO: Variational Sequence-Level Soft Policy Optimization", arxiv.org/abs/2602.10693.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import ObjectiveConfig
from mis_plugins.correction.ratios import exp_clamped, exp_finite
from mis_plugins.loss.objective import (
    Clip,
    Operands,
    PolicyTerm,
    Term,
    reinforce_surrogate,
    sequence_means,
    shared_term,
)
from mis_plugins.packing.ragged import Ragged


def clipped_log_ratio(log_ratio: Tensor, advantages: Tensor, clip: Clip) -> Float[Tensor, " T"]:
    """min(log r, high) where A > 0, else max(log r, -low): the clip's widths are of the logarithm."""
    return torch.where(advantages > 0, log_ratio.clamp(max=clip.high), log_ratio.clamp(min=-clip.low))


def gmpo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """-s mean_t(f_t A_t), with s = exp(mean_t c_t) over the clipped log ratios c_t of the sequence.

    Each token carries its share of value and gradient through sg(log s) + c_t - sg(c_t), as `shared_term` explains.
    """
    own, log_r = clipped_log_ratio(x.log_ratio, x.advantages, clip), x.log_ratio.detach()
    known, _, advantage, clipped_mean = sequence_means(x, ragged, x.factor * x.advantages, own.detach())
    loss = -exp_clamped(clipped_mean + own - own.detach()) * advantage
    held = (own != log_r) & (x.advantages != 0)
    alone = lambda: torch.where(known, -exp_clamped(clipped_mean) * x.advantages, 0)  # noqa: E731
    return PolicyTerm(torch.where(known, loss, 0), held.to(own.dtype), log_r, known, alone)


def sapo_surrogate(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """-4 / tau sigmoid(tau (r - 1)) A, of temperature tau_pos where A > 0, else tau_neg.

    The gradient at r = 1 is that of -r A, and it fades on both sides. Homogeneous in A: c >= 0 times the advantage is
    c times the loss.
    """
    gate = lambda tau: 4 / tau * torch.sigmoid(tau * (ratio - 1))  # noqa: E731
    return -torch.where(advantages > 0, gate(tau_pos), gate(tau_neg)) * advantages


def token_sapo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    loss = x.factor * sapo_surrogate(exp_clamped(x.log_ratio), x.advantages, *_temperatures(x))
    return PolicyTerm(loss, torch.zeros_like(x.advantages), x.log_ratio.detach(), x.usable)


def sequence_sapo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """The gate of the sequence's ratio, the geometric mean over its tokens."""
    tau_pos, tau_neg = _temperatures(x)
    return shared_term(x, ragged, partial(sapo_surrogate, tau_pos=tau_pos, tau_neg=tau_neg))


def _temperatures(x: Operands) -> tuple[float, float]:
    assert x.config.tau_pos is not None and x.config.tau_neg is not None
    return x.config.tau_pos, x.config.tau_neg


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
    """-sg(phi(prod_t r_t)) A log pi_theta; 0 in sequences where a token's ratio is not known."""
    log_r = x.log_ratio.detach()
    usable, valid, total = ragged.sums(x.usable, ragged.loss_mask, log_r)
    known = ragged.loss_mask & ragged.to_tokens(usable == valid)
    weight = soft_weight(ragged.to_tokens(total.to(log_r.dtype)), x.advantages, x.config)
    loss = torch.where(known, x.factor * weight * reinforce_surrogate(x.target, x.advantages), 0)
    return PolicyTerm(loss, torch.zeros_like(log_r), log_r, known)


TERMS: dict[tuple[str, str], Term] = {
    ("gmpo", "token"): gmpo,
    ("sapo", "token"): token_sapo,
    ("sapo", "sequence"): sequence_sapo,
    ("vespo", "token"): vespo,
}
