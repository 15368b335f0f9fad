"""The correction of one micro-batch, read from top to bottom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, Level, Population, WeightConfig
from mis_plugins.correction.plan import UNREJECTED, Plan, plan_of
from mis_plugins.correction.ratios import exp_finite
from mis_plugins.correction.rejection import Totals, kept_units, passing_units, unit_weight
from mis_plugins.correction.token_stage import TokenStage, token_stage, totals_by_population
from mis_plugins.errors import InputError
from mis_plugins.packing.ragged import Ragged

if TYPE_CHECKING:
    from mis_plugins.correction.opsm import Departure
    from mis_plugins.correction.segments import SegmentStage
else:
    Departure = SegmentStage = Any  # loaded where a config has OPSM or segments


@dataclass(frozen=True)
class Verdict:
    """What each token, segment and sequence weighs, before normalization, and whether it stays.

    totals: per-sequence sums and extremes, see `correction/plan.py`.
    by_population: totals that weights and rules of sequences read: over all valid tokens and, where a setting
        asks, over the kept tokens.
    sequence_weight: bounded, at sequence and geometric level; None at the other levels.
    keep_sequences: sequences that mask bound and rules over sequences keep; None where neither can drop one.
    all_rejected: whether there are valid tokens and no kept one has a weight; None where that cannot happen.
    segments: None where the config has neither weight nor rule of segments.
    """

    stage: TokenStage
    segments: SegmentStage | None
    totals: Totals
    by_population: Mapping[Population, Totals]
    sequence_weight: Float[Tensor, " N"] | None
    keep_sequences: Bool[Tensor, " N"] | None
    all_rejected: Bool[Tensor, ""] | None

    @property
    def unit_totals(self) -> Totals:
        """Totals over the population of `aggregate`: for the weight, and rules without an own `aggregate`."""
        return self.by_population[self.stage.config.aggregate]

    @property
    def kept_usable(self) -> Float[Tensor, " N"]:
        """How many usable tokens of each sequence all rules keep."""
        return self.of_kept_sequences(kept_below(self.totals))

    def of_kept_sequences(self, total: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """A total of each sequence that the rules over sequences keep; 0 of the others."""
        return total if self.keep_sequences is None else total * self.keep_sequences


V = TypeVar("V", bound=Verdict)


@dataclass(frozen=True)
class Means:
    """Means of each sequence over its usable tokens, 0 where it has none: of log pi_old, log mu and log r."""

    proximal: Float[Tensor, " N"]
    behavior: Float[Tensor, " N"]
    log_ratio: Float[Tensor, " N"]

    @cached_property
    def perplexities(self) -> tuple[Float[Tensor, " N"], ...]:
        """Perplexity under the trainer, perplexity under the engine, and the first over the second."""
        return exp_finite(-torch.stack([self.proximal, self.behavior, self.log_ratio])).unbind()


@dataclass(frozen=True)
class Kept:
    """Numbers of each sequence over all ranks: how many usable tokens are kept, and the sum of their weights."""

    usable: Float[Tensor, " N"]
    weight: Float[Tensor, " N"]


@dataclass(frozen=True)
class Correction(Verdict):
    """The verdict on a micro-batch with the weights in force, and everything that its metrics are computed from.

    weights: w_t, without gradient; 0 outside loss_mask and where the ratio is not known.
    mean_weight: what the weights were divided by; None without normalization.
    rescale: original over kept number of tokens of each sequence; None with the original denominator.
    on_policy: tokens that OPSM keeps, under the loss hook; None elsewhere.
    after_opsm: kept tokens and weights after rules and OPSM; None without OPSM, or where `metrics` does not ask.
    departure: the numbers that OPSM compares, of each sequence; None where `after_opsm` is None.
    nonfinite_advantages: valid tokens whose advantage is NaN or infinite; None where no loss hook knows advantages.
    """

    config: CorrectionConfig
    ragged: Ragged
    weights: Float[Tensor, " T"]
    mean_weight: Float[Tensor, ""] | None
    rescale: Float[Tensor, " N"] | None
    on_policy: Bool[Tensor, " T"] | None = None
    after_opsm: Kept | None = None
    departure: Departure | None = None
    nonfinite_advantages: Bool[Tensor, " T"] | None = None

    @property
    def log_ratio(self) -> Float[Tensor, " T"]:
        """log pi_old - log mu, unbounded; 0 where it is not known."""
        return self.stage.log_ratio

    @cached_property
    def usable_count(self) -> Float[Tensor, " N"]:
        """Number of usable tokens of each sequence, at least 1: what divides a metric's mean."""
        return self.totals["usable"].clamp(min=1)

    @cached_property
    def means(self) -> Means:
        """Means of each sequence's log-probs; the config must have metrics."""
        proximal, log_ratio = (self.totals[name] / self.usable_count for name in ("proximal", "log_ratio"))
        return Means(proximal, proximal - log_ratio, log_ratio)

    @cached_property
    def valid_count(self) -> Float[Tensor, " N"]:
        """How many valid tokens each sequence has; without metrics one collective over context-parallel ranks."""
        if "valid" in self.totals:
            return self.totals["valid"]
        return self.ragged.sums(self.ragged.loss_mask)[0]

    @cached_property
    def any_valid(self) -> Bool[Tensor, " N"]:
        """Sequences with a valid token."""
        return self.valid_count > 0

    @cached_property
    def sequence_count(self) -> Float[Tensor, ""]:
        """How many sequences have a valid token, at least 1.

        The count is a float: torch divides two whole numbers in its default dtype, which may be bfloat16.
        """
        return self.any_valid.sum(dtype=torch.float32).clamp(min=1)

    @property
    def loss_factor(self) -> Float[Tensor, " T"]:
        """What a kept token's loss is multiplied by: its weight, rescaled to the denominator in force."""
        if self.rescale is None:
            return self.weights
        return self.weights * self.ragged.to_tokens(self.rescale.float())

    @property
    def loss_factor_by_kept(self) -> Float[Tensor, " T"]:
        """Factor of a token's loss for a host that itself divides a sequence's loss by its kept tokens."""
        if not self.config.rejects or self.config.denominator == "kept":
            return self.weights
        valid, kept = self.ragged.sums(self.ragged.loss_mask, self.keep)
        return self.weights * self.ragged.to_tokens((kept / valid.clamp(min=1)).float())

    @cached_property
    def keep(self) -> Bool[Tensor, " T"]:
        """Kept tokens: in loss_mask, and kept by every rule and by OPSM where it is known."""
        keep = self.ragged.loss_mask if self.stage.keep is None else self.stage.keep
        keep = keep if self.on_policy is None else keep & self.on_policy
        return keep if self.keep_sequences is None else keep & self.ragged.to_tokens(self.keep_sequences)


@torch.no_grad()
def correct(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    ragged: Ragged,
    config: CorrectionConfig,
    rollout_mean: Float[Tensor, ""] | None = None,
    numerator: Float[Tensor, " T"] | None = None,
    routes: Float[Tensor, " T"] | None = None,
) -> Correction:
    """Importance weights and rejection masks of one micro-batch.

        log r_t = log pi_old(y_t) - log mu(y_t)
        w       = bound(exp(aggregate(log r))) d / mean weight, with d the factor of rules that down-weigh
        keep    = loss_mask and every rule

    At most one collective over context-parallel ranks, one more where sequences read kept tokens, one for
    each population that segments read, and one over data-parallel ranks with `scope: data_parallel`. Nothing
    waits for the device.

    Args:
        proximal: log-probs of the trainer before the update (pi_old), any float dtype; NaN where there is none
            (`shared/absent.py` makes it of what stands in for one).
        behavior: log-probs that the rollout engine sampled with (mu); NaN where there is none.
        rollout_mean: mean weight of the whole rollout batch, see `mean_weight_of`; for `scope: rollout`.
        numerator: log-probs of pi_{v+1}, which segment-wise weights compare with mu; None without them. Rules
            and metrics of the mismatch read `proximal`.
        routes: number of layers that routed each token otherwise than the engine, for rules with `statistic: route`.

    Raises:
        InputError: `scope: rollout` without its mean.
    """
    plan = plan_of(config)
    normalize = plan.normalize
    if normalize and normalize.scope == "rollout" and rollout_mean is None:
        raise InputError(
            "mis.weight.normalize.scope: rollout needs the mean of the whole rollout batch, and it was never "
            "computed: pass --rollout-data-postprocess-path mis_plugins.mis.normalize_rollout"
        )
    assert (numerator is not None) == config.segment_wise_on
    assert routes is not None or not config.reads_routes
    verdict = _verdict(proximal, behavior, ragged, plan, numerator, routes)
    weights = _token_weights(verdict, ragged)
    mean = rollout_mean if normalize else None
    if config.weight and normalize and normalize.scope != "rollout":
        mean = _mean_weight(verdict, ragged, config.weight)
    if mean is not None:
        weights = weights / mean
    rescale = _rescale(verdict) if config.denominator == "kept" else None
    judged = {part.name: getattr(verdict, part.name) for part in fields(verdict)}
    return Correction(**judged, config=config, ragged=ragged, weights=weights, mean_weight=mean, rescale=rescale)


@torch.no_grad()
def mean_weight_of(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    ragged: Ragged,
    config: CorrectionConfig,
    numerator: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, ""]:
    """The mean bounded weight of a whole batch over data-parallel ranks, for `scope: rollout`."""
    assert config.weight is not None
    assert (numerator is not None) == config.segment_wise_on
    return _mean_weight(_verdict(proximal, behavior, ragged, plan_of(config), numerator), ragged, config.weight)


def kept_below(totals: Totals) -> Float[Tensor, " N"]:
    """Number of tokens of each sequence that rules below sequences keep; all usable ones without such."""
    return totals["kept"] if "kept" in totals else totals["usable"]


def denominator_scale(valid: Float[Tensor, " N"], kept: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """n_valid / n_kept, by which a mean over valid tokens becomes one over kept; 0 where no token is kept."""
    return torch.where(kept > 0, valid / kept, 0)


def _rescale(verdict: Verdict) -> Float[Tensor, " N"]:
    valid = verdict.totals["valid"]
    scale = denominator_scale(valid, verdict.of_kept_sequences(verdict.totals.get("kept", valid)))
    if verdict.stage.config.on_all_rejected != "keep" or verdict.all_rejected is None:
        return scale
    return torch.where(verdict.all_rejected, 1, scale)  # nothing is rejected then


def _verdict(
    proximal: Tensor,
    behavior: Tensor,
    ragged: Ragged,
    plan: Plan,
    numerator: Tensor | None,
    routes: Tensor | None = None,
) -> Verdict:
    """Tokens, then segments, then sequences: what each weighs and whether its rules keep it."""
    stage = token_stage(proximal, behavior, ragged.loss_mask, plan, numerator, routes)
    if plan.config.m2_threshold is not None:
        from mis_plugins.correction.m2po import trimmed

        stage = trimmed(stage, ragged, plan.config.m2_threshold)
    segments = None
    if plan.segments is not None:
        from mis_plugins.correction.segments import segment_stage

        stage, segments = segment_stage(stage, ragged, plan.segments)
    by_population = totals_by_population(stage, ragged, plan.sequences)
    weight = plan.sequences.weight
    verdict = Verdict(
        stage=stage,
        segments=segments,
        totals=by_population["valid"],
        by_population=by_population,
        sequence_weight=unit_weight(by_population[plan.config.aggregate], weight) if weight else None,
        keep_sequences=kept_units(by_population, plan.sequences),
        all_rejected=None,
    )
    if not plan.config.can_end_empty:
        return verdict
    verdict = replace(verdict, all_rejected=_all_rejected(verdict))
    return nothing_rejected(verdict) if plan.config.on_all_rejected == "keep" else verdict


def _all_rejected(verdict: Verdict) -> Bool[Tensor, ""]:
    """Whether there are valid tokens, and the weights of all kept ones add up to 0."""
    totals = verdict.totals
    kept = totals["kept_weight"] if "kept_weight" in totals else kept_below(totals)
    if verdict.sequence_weight is not None:
        kept = kept * verdict.sequence_weight
    # Kept tokens are valid: both differ where there are valid tokens, and none of them is kept with a weight.
    return totals["valid"].any() != verdict.of_kept_sequences(kept).any()


def nothing_rejected(verdict: V) -> V:
    """The verdict, with nothing rejected where everything was rejected."""
    stage, totals, keep, where = verdict.stage, verdict.totals, verdict.keep_sequences, verdict.all_rejected
    segments = verdict.segments
    assert where is not None
    if segments is not None and segments.keep is not None:
        segments = replace(segments, keep=segments.keep | where)
    if stage.keep is not None:
        stage = replace(stage, keep=stage.keep | (where & stage.loss_mask))
    restored = {
        name: torch.where(where, totals[source], totals[name]) for name, source in UNREJECTED.items() if name in totals
    }
    keep = None if keep is None else keep | where
    totals = Totals(totals | restored)
    return replace(verdict, stage=stage, segments=segments, totals=totals, keep_sequences=keep)


def _token_weights(verdict: Verdict, ragged: Ragged) -> Float[Tensor, " T"]:
    """Weights of tokens before normalization: own times sequence's; 1 where a usable token has neither."""
    own = verdict.stage.weight
    if verdict.sequence_weight is None:
        return verdict.stage.usable.float() if own is None else own
    weight = torch.where(verdict.stage.loss_mask, ragged.to_tokens(verdict.sequence_weight.float()), 0)
    return weight if own is None else weight * own


def _mean_weight(verdict: Verdict, ragged: Ragged, weight: WeightConfig) -> Float[Tensor, ""]:
    """Mean of the bounded weights: over tokens at token level, each segment or sequence once at the others.

    The mean is 1 where there is nothing to normalize.
    """
    assert weight.normalize is not None
    population = POPULATION[weight.level]
    total, count = population(verdict, weight, weight.normalize.over == "kept")
    if weight.normalize.scope == "micro_batch":
        total, count = total.sum(), count.sum()
    else:
        total, count = ragged.over_batch(torch.stack([total, count])).unbind()
    return torch.threshold(total / count.clamp(min=1), 1e-8, 1)


def _token_population(verdict: Verdict, weight: WeightConfig, kept_only: bool) -> tuple[Tensor, Tensor]:
    """Sum of token weights and their number, by sequence."""
    totals, kept = verdict.totals, verdict.of_kept_sequences
    if kept_only:
        return kept(totals["kept_weight"]), kept(kept_below(totals))
    if weight.record.drops_token:
        return totals["passing_weight"], totals["passing"]
    return totals["weight"], totals["usable"]


def _sequence_population(verdict: Verdict, weight: WeightConfig, kept_only: bool) -> tuple[Tensor, Tensor]:
    assert verdict.sequence_weight is not None
    averaged = _averaged(verdict.unit_totals, weight)
    if kept_only:
        averaged = averaged & (verdict.kept_usable > 0)
    return torch.where(averaged, verdict.sequence_weight, 0), averaged.double()


def _segment_population(verdict: Verdict, weight: WeightConfig, kept_only: bool) -> tuple[Tensor, Tensor]:
    segments, keep = verdict.segments, verdict.keep_sequences
    assert segments is not None and segments.weight is not None
    averaged = _averaged(segments.totals, weight)
    if kept_only and segments.keep is not None:
        averaged = averaged & segments.keep
    if kept_only and keep is not None:
        averaged = averaged & keep.index_select(0, segments.segments.owner)
    return torch.where(averaged, segments.weight, 0), averaged.double()


def _averaged(totals: Totals, weight: WeightConfig) -> Bool[Tensor, " N"]:
    """Units that a mean of the weights is taken over: all known units that the bound does not drop."""
    return passing_units(totals, weight) if weight.record.drops_token else totals.known


POPULATION: dict[Level, Callable[[Verdict, WeightConfig, bool], tuple[Tensor, Tensor]]] = {
    "token": _token_population,
    "segment": _segment_population,
    "segment_geometric": _segment_population,
    "sequence": _sequence_population,
    "geometric": _sequence_population,
}
"""By level, the function that gives the sum and the number of weights by unit, of all or of kept units."""
