"""SAPO: a soft gate of the ratio in the place of PPO's clip.

Gao et al. 2025, "Soft Adaptive Policy Optimization", arxiv.org/abs/2511.20347.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mis_plugins.correction.ratios import exp_clamped
from mis_plugins.loss.objective import Clip, Operands, PolicyTerm, shared_term
from mis_plugins.packing.ragged import Ragged


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


TERMS = {"token": token_sapo, "sequence": sequence_sapo}
