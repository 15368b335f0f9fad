"""Policy losses, one value a token, on which the target policy pi_theta is trained.

Three policies take part: the behavior policy mu samples, the target policy pi_theta learns, and clipping holds pi_theta
close to the proximal policy pi_old. A surrogate compares pi_theta with one of the others, called `old`. The correction
multiplies the surrogate by a constant `factor`. Hilton et al. 2021, "Batch size-invariance for policy optimization",
arxiv.org/abs/2110.00641.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mis_plugins.config.model import ObjectiveConfig
from mis_plugins.config.terms.divergence import k1, k2, k3
from mis_plugins.config.terms.statistics import binary_kl, prob_diff
from mis_plugins.correction.ratios import exp_clamped, nonfinite, widened
from mis_plugins.errors import ConfigError
from mis_plugins.packing.ragged import Ragged

KlType = Literal["k1", "k2", "k3", "low_var_kl"]


@dataclass(frozen=True)
class Clip:
    """Range of the clipped ratio pi_theta / old, [1 - low, 1 + high]; `dual`, above 1, bounds the loss where A < 0.

    DPPO reads `low` and `high` as the largest divergences, and `dual` as the largest ratio.
    """

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        for name, width in (("low", self.low), ("high", self.high)):
            if not width >= 0:
                raise ConfigError(f"{{{name}}}: got {width:g}; the width of a clip is a number that is not below 0")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"{{dual}}: got {self.dual:g}; a dual clip lies above 1")


@dataclass(frozen=True)
class PolicyTerm:
    """The policy gradient's part of a loss, one value a token.

    loss: the loss, with gradient. Its sum over a sequence is the sum of factor_t times the surrogate of each token.
    clipped: 1 where the clip holds the token back, else 0.
    log_ratio: log pi_theta - log old of the token, or the sequence's mean, without gradient.
    known: where the log ratio is known; the loss is 0 elsewhere.
    alone: makes the surrogate of each token by itself, where `loss` is a share of its sequence's; else None.
    """

    loss: Float[Tensor, " T"]
    clipped: Float[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    known: Bool[Tensor, " T"]
    alone: Callable[[], Float[Tensor, " T"]] | None = None


@dataclass(frozen=True)
class Operands:
    """The tensors that every surrogate reads, all 0 at tokens that are not usable.

    usable: tokens in the loss mask of which both log-probs are finite.
    target, log_ratio: log-probs under pi_theta and log pi_theta - log old, with gradient.
    old: log-probs under the policy that pi_theta is compared with, without gradient.
    advantages, factor: the host's advantages and the correction's factor, without gradient.
    config: the objective, for the settings of a surrogate.
    """

    usable: Bool[Tensor, " T"]
    target: Float[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    old: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    factor: Float[Tensor, " T"]
    config: ObjectiveConfig


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

        f_t (s_t + kl_tau (log pi_theta - log old)^2)

    s_t is the surrogate. The penalty is that of Kimi Team 2026, "Kimi K2.5", arxiv.org/abs/2602.02276.

    Args:
        target: log-probs under pi_theta, with gradient.
        old: log-probs under the policy that the ratio compares pi_theta with; NaN where they are not known.
        factor: what multiplies a token's loss: the weight, at least 0, and 0 where the token is rejected.
    """
    log_r, usable = target_log_ratio(target, old, ragged.loss_mask)
    or_0 = lambda x: torch.where(usable, widened(x), 0)  # noqa: E731
    fixed = lambda x: or_0(x.detach())  # noqa: E731
    operands = Operands(usable, or_0(target), log_r, fixed(old), fixed(advantages), fixed(factor), config)
    term = term_of(config.surrogate, config.ratio)(operands, ragged, clip)
    if not config.kl_tau:
        return term
    of_kept = torch.where(operands.factor > 0, log_r, 0)  # an infinite square of a rejected token would make it NaN
    return replace(term, loss=term.loss + config.kl_tau * operands.factor * of_kept.square())


def target_log_ratio(
    target: Float[Tensor, " T"], old: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """log pi_theta - log old with gradient to both, 0 at unusable tokens, and which tokens are usable."""
    difference = widened(target) - widened(old)
    usable = loss_mask > nonfinite(difference.detach())
    return torch.where(usable, difference, 0), usable


# Surrogates: functions of one token's ratio and advantage.


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
    """1 where PPO's clip removes the token's gradient: r lies beyond the bound towards which A pushes r.

    A comparison has no gradient, and neither has what is made of it.
    """
    beyond = torch.where(advantages > 0, ratio > 1 + clip.high, (ratio < 1 - clip.low) & (advantages < 0))
    return beyond.to(ratio.dtype)


DPPO_CAP = 20.0
"""The cap of the ratio where the host sets no --eps-clip-c: the default of TRL, and of verl's function."""


def moved_away(divergence: Tensor, moved: Tensor, advantages: Tensor, clip: Clip) -> Bool[Tensor, " T"]:
    """DPPO's mask: tokens whose probability A has moved beyond the trust region, so that A would move it further.

    Args:
        moved: pi_theta - old, of the sampled token.
    """
    up = (advantages > 0) & (moved > 0) & (divergence > clip.high)
    return up | ((advantages < 0) & (moved < 0) & (divergence > clip.low))


# Terms: a surrogate with the ratio that it is given, and what is reported of both.


def token_clip(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    ratio = exp_clamped(x.log_ratio)
    loss = x.factor * clipped_surrogate(ratio, x.advantages, clip)
    return PolicyTerm(loss, held_back(ratio, x.advantages, clip), x.log_ratio.detach(), x.usable)


def sequence_clip(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """GSPO: r is exp of the sequence's mean log ratio. Zheng et al. 2025, arxiv.org/abs/2507.18071."""
    term = shared_term(x, ragged, partial(clipped_surrogate, clip=clip))
    return replace(term, clipped=held_back(exp_clamped(term.log_ratio), x.advantages, clip))


def shared_term(x: Operands, ragged: Ragged, surrogate: Callable[[Tensor, Tensor], Tensor]) -> PolicyTerm:
    """A surrogate s(r, A) of the sequence's ratio r, exp of its mean log ratio, of which nothing is clipped.

    Each token's surrogate depends on the log-prob of every token of its sequence, on whatever rank:

        d/d log pi_theta(u) of sum_t f_t s(r, A_t)  =  1/n sum_t f_t ds(r, A_t)/dlog r     for each of n tokens u.

    The surrogate is homogeneous in A, and the sign of A alone chooses its branch. The sum over t therefore equals
    n s(r, gain) + n s(r, cost), where gain is the mean of f_t max(A_t, 0) and cost the mean of f_t min(A_t, 0). Given
    both means, each token carries its own share of value and gradient through
    sg(log r) + log pi_theta(u) - sg(log pi_theta(u)). The forward pass communicates one sum. The backward pass
    communicates nothing, because a rank without a token would not take part.
    """
    weighted = x.factor * x.advantages
    rows = weighted.clamp(min=0), weighted.clamp(max=0)
    known, mean, gain, cost = sequence_means(x, ragged, *rows)
    ratio = exp_clamped(mean + x.log_ratio - x.log_ratio.detach())
    loss = torch.where(known, surrogate(ratio, gain) + surrogate(ratio, cost), 0)
    alone = lambda: torch.where(known, surrogate(exp_clamped(mean), x.advantages), 0)  # noqa: E731
    return PolicyTerm(loss, torch.zeros_like(x.advantages), mean, known, alone)


def token_cispo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    return _cispo(x, x.log_ratio.detach(), x.usable, clip)


def sequence_cispo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """CISPO on the sequence's ratio, which is a constant: no gradient crosses tokens."""
    known, mean = sequence_means(x, ragged)
    return _cispo(replace(x, factor=torch.where(known, x.factor, 0)), mean, known, clip)


def _cispo(x: Operands, log_ratio: Tensor, known: Tensor, clip: Clip) -> PolicyTerm:
    ratio = exp_clamped(log_ratio)
    outside = ((ratio < 1 - clip.low) | (ratio > 1 + clip.high)).to(ratio.dtype)
    loss = x.factor * cispo_surrogate(ratio, x.target, x.advantages, clip)
    return PolicyTerm(loss, outside, log_ratio, known)


def dppo_tv(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """DPPO with the total variation |pi_theta - old| of the sampled token against all others."""
    moved = prob_diff(x.target.detach(), x.old)
    return _dppo(x, moved_away(moved.abs(), moved, x.advantages, clip), clip)


def dppo_kl(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """DPPO with the binary KL divergence from old to pi_theta of the sampled token against all others."""
    target = x.target.detach()
    divergence, moved = binary_kl(target, x.old), prob_diff(target, x.old)
    return _dppo(x, moved_away(divergence, moved, x.advantages, clip), clip)


def ipo(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """IPO, prime-rl's: DPPO that masks a token beyond the trust region whatever the sign of A."""
    moved = prob_diff(x.target.detach(), x.old)
    return _dppo(x, (moved > clip.high) | (moved < -clip.low), clip)


def _dppo(x: Operands, away: Bool[Tensor, " T"], clip: Clip) -> PolicyTerm:
    """-sg(min(r, c)) A log pi_theta, and 0 where the policy has moved away.

    Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arxiv.org/abs/2602.04879.
    """
    ratio = exp_clamped(x.log_ratio.detach())
    capped = ratio.clamp(max=DPPO_CAP if clip.dual is None else clip.dual)
    loss = x.factor * (-capped.masked_fill(away, 0) * x.advantages * x.target)
    return PolicyTerm(loss, away.to(ratio.dtype), x.log_ratio.detach(), x.usable)


def reinforce(x: Operands, ragged: Ragged, clip: Clip) -> PolicyTerm:
    """REINFORCE: nothing is clipped."""
    loss = x.factor * reinforce_surrogate(x.target, x.advantages)
    return PolicyTerm(loss, torch.zeros_like(x.advantages), x.log_ratio.detach(), x.usable)


Term = Callable[[Operands, Ragged, Clip], PolicyTerm]
TERMS: dict[tuple[str, str], Term] = {
    ("clip", "token"): token_clip,
    ("clip", "sequence"): sequence_clip,
    ("cispo", "token"): token_cispo,
    ("cispo", "sequence"): sequence_cispo,
    ("dppo_tv", "token"): dppo_tv,
    ("dppo_kl", "token"): dppo_kl,
    ("ipo", "token"): ipo,
    ("reinforce", "token"): reinforce,
}
"""The terms that many configs ask for; `further_terms.py` has all others."""


def term_of(surrogate: str, ratio: str) -> Term:
    """The term of a surrogate, by what `mis.objective.ratio` says."""
    if (surrogate, ratio) in TERMS:
        return TERMS[surrogate, ratio]
    from mis_plugins.loss import further_terms  # few configs need the file

    return further_terms.TERMS[surrogate, ratio]


def sequence_means(x: Operands, ragged: Ragged, *rows: Float[Tensor, " T"]) -> list[Shaped[Tensor, " T"]]:
    """Numbers of a sequence at each of its tokens: whether it is known, its mean log ratio, its means of `rows`.

    A sequence is known if all its valid tokens are usable. The sums cost one collective over context-parallel ranks.
    """
    log_r = x.log_ratio.detach()
    usable, valid, *totals = ragged.sums(x.usable, ragged.loss_mask, log_r, *rows)
    means = [ragged.to_tokens((total / valid.clamp(min=1)).to(log_r.dtype)) for total in totals]
    return [ragged.loss_mask & ragged.to_tokens(usable == valid), *means]


# The penalty for leaving a reference policy.


# Estimators of KL(pi_theta || pi_ref) from log pi_ref - log pi_theta.
ESTIMATORS: dict[KlType, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}
LOW_VAR_KL_BOUND = 10.0  # the hosts clamp low_var_kl to this bound, after whatever multiplies it


def kl_term(
    target: Float[Tensor, " T"],
    reference: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    kind: KlType,
    log_ratio: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, " T"]:
    """An estimate of KL(pi_theta, pi_ref) at each token, with gradient; 0 where a log-prob is not finite.

    Args:
        log_ratio: log pi_theta - log old, with gradient. The estimate is multiplied by exp(log_ratio), so that the
            estimate and its gradient are unbiased although `old` sampled. DeepSeek-AI 2025, arxiv.org/abs/2512.02556,
            section 3.1.
    """
    to_reference, _ = target_log_ratio(reference, target, loss_mask)
    kl = ESTIMATORS[kind](to_reference)
    if log_ratio is not None:
        kl = exp_clamped(log_ratio) * kl
    return kl.clamp(-LOW_VAR_KL_BOUND, LOW_VAR_KL_BOUND) if kind == "low_var_kl" else kl
