"""GMPO: PPO's clip of each token's log ratio, and the geometric mean of what the clip leaves.

Zhao et al. 2025, "Geometric-Mean Policy Optimization", arxiv.org/abs/2507.20673.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.correction.ratios import exp_clamped
from mis_plugins.loss.objective import Clip, Operands, PolicyTerm, sequence_means
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
    held = (own.detach() != log_r) & (x.advantages != 0)
    alone = lambda: torch.where(known, -exp_clamped(clipped_mean) * x.advantages, 0)  # noqa: E731
    return PolicyTerm(torch.where(known, loss, 0), held.to(own.dtype), log_r, known, alone)


TERMS = {"token": gmpo}
