"""The policy loss of one micro-batch from top to bottom: correction, OPSM, surrogate, entropy, KL, reported metrics."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig
from mis_plugins.correction.opsm import Departure, departure_rows, on_policy, reference_policy
from mis_plugins.correction.pipeline import Correction, Kept, correct, denominator_scale, nothing_rejected
from mis_plugins.correction.ratios import exp_clamped, nonfinite
from mis_plugins.loss.objective import Clip, KlType, PolicyTerm, kl_term, policy_term, target_log_ratio
from mis_plugins.metrics.token_metrics import Average, diagnose, scaled_back
from mis_plugins.packing.ragged import Ragged
from mis_plugins.versions.segment_wise import Written, proximal_t

if TYPE_CHECKING:
    from mis_plugins.loss.centering import Head
else:
    Head = Any  # loaded where a batch has one: other jobs pay nothing for it

Reduce = Callable[[Float[Tensor, " T"]], Float[Tensor, ""]]


@dataclass(frozen=True)
class LossInputs:
    """The tokens of one micro-batch on this rank, packed, with their log-probs under each policy.

    target: log-probs under pi_theta, with gradient. The other log-probs have none.
    proximal: log-probs under the trainer before the update, or under pi_theta where the host recomputes none.
    behavior: log-probs under the rollout engine; None where the host has none.
    reference: log-probs under the reference policy of the KL term; None where there is no KL term.
    advantages: the host's advantages, without gradient; the loss reads `finite_advantages`.
    entropy: entropy of pi_theta's distribution at each token; None where it is not wanted.
    written: which version wrote each token; None where the host does not know.
    head: the engine's likeliest tokens at each position; None where neither loss nor metrics read them.
    """

    ragged: Ragged
    target: Float[Tensor, " T"]
    proximal: Float[Tensor, " T"]
    behavior: Float[Tensor, " T"] | None
    reference: Float[Tensor, " T"] | None
    advantages: Float[Tensor, " T"]
    entropy: Float[Tensor, " T"] | None
    written: Written | None = None
    head: Head | None = None

    @cached_property
    def finite_advantages(self) -> Float[Tensor, " T"]:
        """Advantages, and 0 where one is NaN or infinite: the token learns nothing, and the loss stays finite."""
        return torch.where(self._nonfinite, 0, self.advantages)

    @cached_property
    def nonfinite_advantages(self) -> Bool[Tensor, " T"]:
        """Valid tokens whose advantage is NaN or infinite."""
        return self.ragged.loss_mask & self._nonfinite

    @cached_property
    def _nonfinite(self) -> Bool[Tensor, " T"]:
        return nonfinite(self.advantages)


@dataclass(frozen=True)
class LossConfig:
    """What the host's flags say of the loss; `mis.objective` and `mis.opsm` say the rest.

    kl_type: the estimator of the KL term; None without a KL term.
    average: what the host takes the mean of metrics over, or the share of the step that trains; None where neither is
        known.
    """

    clip: Clip
    entropy_coef: float = 0.0
    kl_type: KlType | None = None
    kl_coef: float = 0.0
    average: Average | None = None


@dataclass(frozen=True)
class Share:
    """Which tokens enter the loss, and by which factor.

    keep: the loss mask less what rules reject, without OPSM: the tokens that enter entropy and KL.
    on_policy: the tokens that OPSM does not mask; None without OPSM.
    scale: factor from the host's denominator to the configured one.
    factor: factor of the surrogate: the scaled weight, 0 where the token is rejected or masked by OPSM.
    all_rejected: whether there are valid tokens and rules, or rules and OPSM, leave none with a weight. None where
        nothing can reject. The flag does not depend on `on_all_rejected`.
    of_center: factor of the centering term: `factor` without the weight's bound, which the term holds itself; 0 where
        a rule or OPSM drops the token. None without score centering.
    """

    keep: Bool[Tensor, " T"]
    on_policy: Bool[Tensor, " T"] | None
    scale: Float[Tensor, " T"]
    factor: Float[Tensor, " T"]
    all_rejected: Bool[Tensor, ""] | None
    of_center: Float[Tensor, " T"] | None = None

    def kept(self, x: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        return torch.where(self.keep, x, 0)


def without_behavior(x: LossInputs, config: CorrectionConfig) -> Correction:
    """A correction that changes nothing, for what is counted where the rollout engine gave no log-probs.

    OPSM's mask and advantages that are not finite are recorded as of any other micro-batch.
    """
    return correct(x.proximal, x.proximal, x.ragged, replace(config, metrics="none"))


def compared_log_probs(x: LossInputs, config: CorrectionConfig) -> Float[Tensor, " T"]:
    """Log-probs that weights and rules compare with those of mu: pi_old's, or pi_theta's with `bypass`."""
    return x.target.detach() if config.bypass else x.proximal


def numerator_of(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"] | None,
    written: Written | None,
    config: CorrectionConfig,
) -> Float[Tensor, " T"] | None:
    """Log-probs under pi_{v+1}, which segment-wise weights compare with those of mu; None where these are off."""
    if config.segment_wise is None or not config.segment_wise.enabled:
        return None
    assert behavior is not None and written is not None
    return proximal_t(proximal, behavior, written, config.segment_wise)


def compared_with(x: LossInputs, config: CorrectionConfig) -> Float[Tensor, " T"]:
    """Log-probs of the policy, called `old`, that PPO's ratio compares pi_theta with; NaN where they are not known."""
    if config.clips_against_next:
        next_version = numerator_of(x.proximal, x.behavior, x.written, config)
        assert next_version is not None
        return next_version
    old = x.behavior if config.bypass else x.proximal
    assert old is not None
    return old


@torch.no_grad()
def share_of(x: LossInputs, correction: Correction | None, config: CorrectionConfig) -> Share:
    """Which tokens enter the loss after correction and OPSM, and by which factor.

    `correction` is that of `compared_log_probs` against the behavior policy; None where there is none.

    With `denominator: kept`, entropy and KL are divided by the tokens that rules keep, the surrogate by those that OPSM
    leaves too. OPSM costs two collectives over context-parallel ranks: one for its divergence, one for the kept tokens.
    """
    mask, all_rejected = x.ragged.loss_mask, None
    keep, scale = mask, mask.float()
    weights = scale
    if correction is not None and config.corrects:
        keep, weights, all_rejected = correction.keep, correction.weights, correction.all_rejected
        if correction.rescale is not None:
            scale = x.ragged.to_tokens(correction.rescale.float())
    if config.opsm is None:
        share = Share(keep, None, scale, torch.where(keep, weights * scale, 0), all_rejected)
        return _centered(share, x, correction, config, scale)
    reference = reference_policy(x.behavior, x.proximal, config.opsm)
    stays = on_policy(x.target.detach(), reference, x.finite_advantages, x.ragged, config.opsm)
    valid, after, weighed = x.ragged.sums(mask, keep & stays, keep & stays & (weights > 0))
    nothing_left = (valid > 0).any() & ~(weighed > 0).any()
    if config.on_all_rejected == "keep":
        keep, stays = keep | (nothing_left & mask), stays | (nothing_left & mask)
        scale = torch.where(nothing_left & mask, 1, scale)
        after = torch.where(nothing_left, valid, after)
    of_surrogate = scale
    if config.denominator == "kept":
        of_surrogate = x.ragged.to_tokens(denominator_scale(valid, after).float())
    factor = torch.where(keep & stays, weights * of_surrogate, 0)
    # Where rules reject everything, OPSM sees the tokens that `on_all_rejected` gave back.
    all_rejected = nothing_left if all_rejected is None else nothing_left | all_rejected
    return _centered(Share(keep, stays, scale, factor, all_rejected), x, correction, config, of_surrogate)


def _centered(
    share: Share, x: LossInputs, correction: Correction | None, config: CorrectionConfig, scale: Tensor
) -> Share:
    """The share with the factor of the centering term, where the config centers."""
    if x.head is None or correction is None or config.center is None:
        return share
    return x.head.shared(share, correction, scale)


def given_back(correction: Correction, share: Share) -> Correction:
    """The correction with rules and OPSM judged together: `on_all_rejected: keep` undoes both if all is rejected."""
    if share.on_policy is None:
        return correction
    correction = replace(correction, all_rejected=share.all_rejected)
    return nothing_rejected(correction) if correction.config.on_all_rejected == "keep" else correction


@torch.no_grad()
def for_metrics(x: LossInputs, correction: Correction, share: Share) -> Correction:
    """The correction as a step's metrics read it: with OPSM's mask, and with which advantages are not finite.

    OPSM with `metrics: all` costs one collective over context-parallel ranks; everything else costs none.
    """
    correction = replace(
        given_back(correction, share), on_policy=share.on_policy, nonfinite_advantages=x.nonfinite_advantages
    )
    if share.on_policy is None or not correction.config.reports_step:
        return correction
    kept, opsm = correction.keep & correction.stage.usable, correction.config.opsm
    assert opsm is not None and x.behavior is not None
    policies = x.target.detach(), x.proximal, x.behavior
    compared = departure_rows(*policies, x.finite_advantages, x.ragged.loss_mask, opsm)
    usable, weight, *departure = x.ragged.sums(kept, torch.where(kept, correction.weights, 0), *compared)
    return replace(correction, after_opsm=Kept(usable, weight), departure=Departure.of(departure))


def micro_batch_loss(
    x: LossInputs,
    correction: Correction,
    share: Share,
    config: CorrectionConfig,
    flags: LossConfig,
    reduce: Reduce,
    reduce_policy: Reduce | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The loss, and what the host logs of it, detached, under the host's own names where it has one.

        loss = reduce(f_t s_t) - entropy_coef reduce(H_t) + kl_coef reduce(KL_t)

    s_t is the surrogate. Its factor f_t holds weight, rejection, OPSM and denominator. A rejected token leaves every
    term, as in the hosts, and OPSM masks the surrogate alone. `weigh_kl` gives the KL term the factor f_t too.

    Args:
        correction: what is reported: the correction that `share` was made of, or one without metrics.
        config: the config, with `objective`, and OPSM where it is on.
        reduce: the host's average over the loss mask before rejection.
        reduce_policy: the host's average of the surrogate; None takes `reduce`.
    """
    objective = config.objective or ObjectiveConfig()
    old = compared_with(x, config)
    term = policy_term(x.target, old, x.finite_advantages, share.factor, x.ragged, objective, flags.clip)
    centered = None if x.head is None else x.head.center(x.target, term.known, config)
    if centered is not None and share.of_center is not None:
        term = replace(term, loss=term.loss + x.finite_advantages * share.of_center * centered.log_probs)
    loss = pg_loss = (reduce_policy or reduce)(term.loss)
    terms = {"pg_loss": pg_loss, "entropy_loss": torch.zeros_like(pg_loss)}
    if x.entropy is not None:
        terms["entropy_loss"] = reduce(share.kept(x.entropy * share.scale))
        loss = loss - flags.entropy_coef * terms["entropy_loss"] if flags.entropy_coef else loss
    if flags.kl_type is not None:
        terms["kl_loss"] = reduce(_kl(x, old, share, objective, flags.kl_type))
        loss = loss + flags.kl_coef * terms["kl_loss"] if flags.kl_coef else loss
    with torch.no_grad():
        reported = {name: value.detach() for name, value in ({"loss": loss} | terms).items()}
        reported |= {name: reduce(value) for name, value in _host_metrics(x, term, share, config)}
        if x.head is not None and centered is not None and config.metrics != "none":
            reported |= {name: reduce(value) for name, value in x.head.metrics(x, centered, share, config)}
        if config.metrics != "none":
            lost = x.nonfinite_advantages.to(term.clipped.dtype)
            reported["nonfinite_advantages"] = reduce(scaled_back(lost, correction, flags.average))
        ours = diagnose(given_back(correction, share), average=flags.average)
        reported |= {name: reduce(value) for name, value in ours.items()}
    return loss, reported


@torch.no_grad()
def uncorrected(x: LossInputs, config: CorrectionConfig, flags: LossConfig) -> Float[Tensor, " T"]:
    """The surrogate of each token before weight, rejection and OPSM."""
    objective = config.objective or ObjectiveConfig()
    old = compared_with(x, config)
    every, advantages = x.ragged.loss_mask.float(), x.finite_advantages
    term = policy_term(x.target.detach(), old, advantages, every, x.ragged, objective, flags.clip)
    # A share of a sequence's loss is what no token weight or mask can split.
    return term.loss if term.alone is None else term.alone()


def _kl(x: LossInputs, old: Tensor, share: Share, objective: ObjectiveConfig, kind: KlType) -> Float[Tensor, " T"]:
    assert x.reference is not None
    mask, log_ratio = x.ragged.loss_mask, None
    if objective.unbiased_kl:
        log_ratio, mask = target_log_ratio(x.target, old, mask)  # the product is not known where the ratio is not
    kl = kl_term(x.target, x.reference, mask, kind, log_ratio)
    return torch.where(share.factor > 0, kl * share.factor, 0) if objective.weigh_kl else share.kept(kl * share.scale)


def _host_metrics(
    x: LossInputs, term: PolicyTerm, share: Share, config: CorrectionConfig
) -> Iterator[tuple[str, Float[Tensor, " T"]]]:
    """Metrics that the hosts report beside the loss, one value a token; rejected tokens count 0, as in the hosts."""
    yield "pg_clipfrac", share.kept(term.clipped)
    yield "ppo_kl", share.kept(-term.log_ratio)
    if config.metrics in ("full", "all"):
        yield "ess_ratio", _effective_share(exp_clamped(term.log_ratio), x.ragged)
    if share.on_policy is not None:
        yield "opsm_clipfrac", (x.ragged.loss_mask & ~share.on_policy).to(term.clipped.dtype)
    if x.behavior is None:
        return
    compared = compared_log_probs(x, config)
    log_ratio, _ = target_log_ratio(compared, x.behavior, x.ragged.loss_mask)
    yield "train_rollout_logprob_abs_diff", share.kept(log_ratio.abs())
    yield "train_rollout_kl", share.kept(kl_term(x.behavior, compared, x.ragged.loss_mask, "low_var_kl"))
    if config.corrects:
        yield "ois", torch.where(x.ragged.loss_mask, exp_clamped(term.log_ratio), 0)


def _effective_share(ratio: Float[Tensor, " T"], ragged: Ragged) -> Float[Tensor, " T"]:
    """Effective sample size (sum r)^2 / (n sum r^2) of each sequence's ratios r = pi_theta / old, at its tokens.

    The share is 1 on policy, and 1 / n where one token's ratio outweighs all others.
    """
    valid_ratio = torch.where(ragged.loss_mask, ratio, 0)
    sums = ragged.totals({"valid": ragged.loss_mask, "ratio": valid_ratio}, {"ratio_squared": valid_ratio})
    share = sums["ratio"].square() / (sums["valid"] * sums["ratio_squared"]).clamp(min=torch.finfo(torch.float32).tiny)
    return ragged.to_tokens(share.to(ratio.dtype))
