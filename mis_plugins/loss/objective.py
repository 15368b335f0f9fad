"""Policy losses, a token each: what the target policy pi_theta is trained on.

Three policies take part: the behavior policy mu sampled, the proximal policy pi_old is what clipping holds pi_theta to,
the target policy pi_theta learns. A surrogate compares pi_theta with one of the others, its `old`; what the correction
makes of the mismatch is a constant `factor` on it. Hilton et al. 2021, "Batch size-invariance for policy optimization",
arxiv.org/abs/2110.00641.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mis_plugins.config.model import ObjectiveConfig
from mis_plugins.correction.divergence import k1, k2, k3
from mis_plugins.correction.ratios import exp_clamped, finite, widened
from mis_plugins.errors import ConfigError
from mis_plugins.packing.ragged import Ragged

KlType = Literal["k1", "k2", "k3", "low_var_kl"]


@dataclass(frozen=True)
class Clip:
    """How far pi_theta / old may move: to [1 - low, 1 + high]; `dual`, above 1, bounds the loss where A < 0."""

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.dual is not None and self.dual <= 1:
            raise ConfigError(f"{{dual}}: got {self.dual:g}; a dual clip lies above 1")


@dataclass(frozen=True)
class PolicyTerm:
    """The policy gradient's part of a loss.

    loss: with gradient; over a sequence it adds up to factor_t times the surrogate of each token.
    clipped: 1 where the clip holds the token back, else 0.
    log_ratio: log pi_theta - log old, without gradient: the token's, or the sequence's mean.
    known: where it is known; the loss is 0 elsewhere.
    """

    loss: Float[Tensor, " T"]
    clipped: Float[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    known: Bool[Tensor, " T"]


@dataclass(frozen=True)
class Operands:
    """What every surrogate reads.

    usable: in loss_mask, and both log-probs finite. Everything else is 0 elsewhere.
    target, log_ratio: with gradient.
    advantages, factor: without.
    """

    usable: Bool[Tensor, " T"]
    target: Float[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    factor: Float[Tensor, " T"]


def policy_term(
    target: Float[Tensor, " T"],
    old: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    factor: Float[Tensor, " T"],
    ragged: Ragged,
    config: ObjectiveConfig,
    clip: Clip,
) -> PolicyTerm:
    """The loss of every token under `config.surrogate` and `config.ratio`, in float32 or wider.

    Args:
        target: log-probs of pi_theta, with gradient.
        old: of what it is compared with, `config.old`.
        factor: what a token's loss is multiplied by: its weight, at least 0, and 0 where it is rejected.
    """
    log_r, usable = target_log_ratio(target, old, ragged.loss_mask)
    live = lambda x: torch.where(usable, widened(x), 0)  # noqa: E731
    operands = Operands(usable, live(target), log_r, live(advantages.detach()), live(factor.detach()))
    return TERMS[config.surrogate, config.ratio](operands, ragged, clip)


def target_log_ratio(
    target: Float[Tensor, " T"], old: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """log pi_theta - log old, with gradient to either, and where it is known; elsewhere it reads 0."""
    difference = widened(target) - widened(old)
    usable = loss_mask & finite(difference.detach())
    return torch.where(usable, difference, 0), usable


# Surrogates: each of one token, of one ratio.


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """PPO: -min(r A, clip(r, 1 - low, 1 + high) A), and at most -dual A where A < 0.

    Schulman et al. 2017, arxiv.org/abs/1707.06347, equation 7; the dual clip is Ye et al. 2019,
    arxiv.org/abs/1912.09729. Homogeneous in A: c >= 0 times the advantage is c times the loss.
    """
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    if clip.dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -clip.dual * advantages), loss)


def cispo_surrogate(ratio: Tensor, target: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi_theta: a clipped token still teaches, at the bound's weight.

    MiniMax 2025, "MiniMax-M1", arxiv.org/abs/2506.13585, equation 4. The paper itself has no lower bound: low >= 1.
    """
    return -ratio.detach().clamp(1 - clip.low, 1 + clip.high) * advantages * target


def reinforce_surrogate(target: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi_theta. Williams 1992; the factor holds the importance weight sg(pi_theta / mu)."""
    return -advantages * target


def held_back(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """1 where PPO's clip takes the token's gradient: r beyond a bound, in the direction that A pushes it."""
    beyond = torch.where(advantages > 0, ratio > 1 + clip.high, (ratio < 1 - clip.low) & (advantages < 0))
    return beyond.to(ratio.dtype)


# Terms: a surrogate, the ratio it is given, and what it reports.


def token_clip(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    ratio = exp_clamped(x.log_ratio)
    loss = x.factor * clipped_surrogate(ratio, x.advantages, clip)
    return PolicyTerm(loss, held_back(ratio.detach(), x.advantages, clip), x.log_ratio.detach(), x.usable)


def sequence_clip(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """GSPO: r is exp of the sequence's mean log ratio. Zheng et al. 2025, arxiv.org/abs/2507.18071.

    Every token's surrogate depends on every token's log-prob, on whatever rank:

        d/d log pi_theta(u) of sum_t f_t s(r, A_t)  =  1/n sum_t f_t ds(r, A_t)/dlog r     for each of n tokens u.

    The surrogate is homogeneous in A and A's sign alone chooses its branch, so that the sum over t equals n s(r, gain)
    + n s(r, cost) with the means of f_t max(A_t, 0) and f_t min(A_t, 0). Given these, each token carries its own share
    of value and gradient through sg(log r) + log pi_theta(u) - sg(log pi_theta(u)). One forward sum, and nothing to
    communicate in a backward that a rank without a token would not run.
    """
    weighted = x.factor * x.advantages
    rows = weighted.clamp(min=0), weighted.clamp(max=0)
    known, mean, gain, cost = _sequence_means(x, ragged, *rows)
    ratio = exp_clamped(mean + x.log_ratio - x.log_ratio.detach())
    loss = clipped_surrogate(ratio, gain, clip) + clipped_surrogate(ratio, cost, clip)
    loss = torch.where(known, loss, 0)
    return PolicyTerm(loss, held_back(ratio.detach(), x.advantages, clip), mean, known)


def token_cispo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    return _cispo(x, x.log_ratio.detach(), x.usable, clip)


def sequence_cispo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """The ratio is a constant here, and no gradient crosses tokens."""
    known, mean = _sequence_means(x, ragged)
    return _cispo(replace(x, factor=torch.where(known, x.factor, 0)), mean, known, clip)


def _cispo(x: Operands, log_ratio: Tensor, known: Tensor, clip: Clip) -> PolicyTerm:
    ratio = exp_clamped(log_ratio)
    outside = ((ratio < 1 - clip.low) | (ratio > 1 + clip.high)).to(ratio.dtype)
    loss = x.factor * cispo_surrogate(ratio, x.target, x.advantages, clip)
    return PolicyTerm(loss, outside, log_ratio, known)


def reinforce(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """Nothing is clipped."""
    loss = x.factor * reinforce_surrogate(x.target, x.advantages)
    return PolicyTerm(loss, torch.zeros_like(x.advantages), x.log_ratio.detach(), x.usable)


TERMS: dict[tuple[str, str], Callable[[Operands, Ragged, Clip], PolicyTerm]] = {
    ("clip", "token"): token_clip,
    ("clip", "sequence"): sequence_clip,
    ("cispo", "token"): token_cispo,
    ("cispo", "sequence"): sequence_cispo,
    ("reinforce", "token"): reinforce,
}


def _sequence_means(x: Operands, ragged: Ragged, *rows: Float[Tensor, " T"]) -> list[Shaped[Tensor, " T"]]:
    """At each token, of its sequence: whether every valid token is usable; the mean log ratio; the means of `rows`.

    One collective over context-parallel ranks.
    """
    log_r = x.log_ratio.detach()
    sums, _ = ragged.over_sequence((x.usable, ragged.loss_mask, log_r, *rows))
    usable, valid, *totals = sums.unbind()
    means = [ragged.to_tokens((total / valid.clamp(min=1)).to(log_r.dtype)) for total in totals]
    return [ragged.loss_mask & ragged.to_tokens(usable == valid), *means]


# The penalty for leaving a reference policy.


# Of log pi_ref - log pi_theta.
ESTIMATORS: dict[KlType, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}
LOW_VAR_KL_BOUND = 10.0  # of the hosts' low_var_kl, after whatever multiplies it


def kl_term(
    target: Float[Tensor, " T"],
    reference: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    kind: KlType,
    log_ratio: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, " T"]:
    """An estimate of KL(pi_theta, pi_ref) at each token, with gradient; 0 where a log-prob is not finite.

    Args:
        log_ratio: log pi_theta - log old, with gradient: the estimate is multiplied by its exponential, which makes
            it, and its gradient, unbiased although `old` sampled. DeepSeek-AI 2025, arxiv.org/abs/2512.02556, 3.1.
    """
    to_reference, _ = target_log_ratio(reference, target, loss_mask)
    kl = ESTIMATORS[kind](to_reference)
    if log_ratio is not None:
        kl = exp_clamped(log_ratio) * kl
    return kl.clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND) if kind == "low_var_kl" else kl
