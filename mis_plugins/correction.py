"""The correction of one micro-batch, read from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config import CorrectionConfig, WeightConfig
from mis_plugins.errors import InputError
from mis_plugins.ragged import Ragged
from mis_plugins.rejection import Totals, aggregate, passes
from mis_plugins.segments import SegmentStage, needs_segments, segment_stage
from mis_plugins.totals import UNREJECTED, TokenStage, over_sequences, sequence_rules, token_stage
from mis_plugins.units import counted_units, known, passing_units, unit_weight
from mis_plugins.weights import normalization


@dataclass(frozen=True)
class Correction:
    """What a micro-batch's loss is multiplied by and what of it stays.

    weights: w_t, without gradient; 0 outside loss_mask and where the ratio is not known.
    keep_tokens: what rules over tokens and segments (or a mask bound of theirs) leave; None where there is none.
    keep_sequences: what the rules over sequences leave; None where there is none.
    mean_weight: what the weights were divided by; None without normalization.
    sequence_weight: bounded and not yet normalized, at sequence and geometric level; None at the others.
    all_rejected: there are valid tokens and no sequence keeps one with a weight; None where nothing can be rejected.
    rescale: original over kept number of tokens of each sequence; None with the original denominator.
    segments: None where the config knows none.
    totals: per-sequence sums and extremes, see `totals.py`.
    """

    config: CorrectionConfig
    ragged: Ragged
    stage: TokenStage
    totals: Totals
    weights: Float[Tensor, " T"]
    keep_sequences: Bool[Tensor, " N"] | None
    mean_weight: Float[Tensor, ""] | None
    sequence_weight: Float[Tensor, " N"] | None
    all_rejected: Bool[Tensor, ""] | None
    rescale: Float[Tensor, " N"] | None
    segments: SegmentStage | None

    @property
    def log_ratio(self) -> Float[Tensor, " T"]:
        """log pi_old - log mu, unbounded; 0 where it is not known."""
        return self.stage.log_ratio

    @cached_property
    def means(self) -> dict[str, Float[Tensor, " N"]]:
        """Mean over the usable tokens of each sequence, 0 where there are none; of the totals summed for metrics."""
        count = self.totals["usable"].clamp(min=1)
        return {name: self.totals[name] / count for name in ("log_ratio", "proximal", "ratio_squared")}

    @cached_property
    def live(self) -> Bool[Tensor, " N"]:
        """Sequences with a valid token; needs metrics."""
        return self.totals["valid"] > 0

    @property
    def keep_tokens(self) -> Bool[Tensor, " T"] | None:
        return self.stage.keep

    @property
    def loss_factor(self) -> Float[Tensor, " T"]:
        """What a kept token's loss is multiplied by: its weight, rescaled to the denominator in force."""
        if self.rescale is None:
            return self.weights
        return self.weights * self.ragged.to_tokens(self.rescale.float())

    @cached_property
    def keep(self) -> Bool[Tensor, " T"]:
        """loss_mask and every rule."""
        keep = self.ragged.loss_mask if self.keep_tokens is None else self.keep_tokens
        return keep if self.keep_sequences is None else keep & self.ragged.to_tokens(self.keep_sequences)


@torch.no_grad()
def correct(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    ragged: Ragged,
    config: CorrectionConfig,
    rollout_mean: Float[Tensor, ""] | None = None,
) -> Correction:
    """Importance weights and rejection masks of one micro-batch.

        log r_t = log pi_old(y_t) - log mu(y_t)
        w       = bound(exp(aggregate(log r))) / mean weight
        keep    = loss_mask and every rule

    At most one collective over context-parallel ranks, and one over data-parallel ones where the normalization
    says `data_parallel`; no wait for the device.

    Args:
        proximal: log-probs of the trainer before the update (pi_old), any float dtype.
        behavior: log-probs that the rollout engine sampled with (mu).
        rollout_mean: mean weight of the whole rollout batch, see `mean_weight_of`; for `scope: rollout`.

    Raises:
        InputError: `scope: rollout` without its mean.
    """
    normalize = config.weight.normalize if config.weight else None
    if normalize and normalize.scope == "rollout" and rollout_mean is None:
        raise InputError(
            "mis.weight.normalize.scope: rollout needs the mean of the whole rollout batch, and it was never "
            "computed: pass --rollout-data-postprocess-path mis_plugins.mis.normalize_rollout"
        )
    stage, segments = _staged(proximal, behavior, ragged, config)
    totals = over_sequences(stage, ragged, config)
    keep_sequences = _keep_sequences(totals, config)
    sequence_weight = _sequence_weight(totals, config.weight)
    all_rejected = None
    if config.can_end_empty:
        all_rejected = _all_rejected(totals, keep_sequences, sequence_weight)
    if config.on_all_rejected == "keep" and all_rejected is not None:
        stage, totals, keep_sequences = _nothing_rejected(stage, totals, keep_sequences, all_rejected)
    weights = _token_weights(stage, ragged, sequence_weight)
    mean = rollout_mean if normalize else None
    if config.weight and normalize and normalize.scope != "rollout":
        mean = _mean_weight(Pool(totals, sequence_weight, segments, keep_sequences), ragged, config.weight)
    if mean is not None:
        weights = weights / mean
    rescale = None
    if config.denominator == "kept":
        rescale = denominator_scale(totals["valid"], kept_in(totals, keep_sequences))
    return Correction(
        config=config,
        ragged=ragged,
        stage=stage,
        totals=totals,
        weights=weights,
        keep_sequences=keep_sequences,
        mean_weight=mean,
        sequence_weight=sequence_weight,
        all_rejected=all_rejected,
        rescale=rescale,
        segments=segments,
    )


@torch.no_grad()
def mean_weight_of(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], ragged: Ragged, config: CorrectionConfig
) -> Float[Tensor, ""]:
    """The mean bounded weight of a whole batch over data-parallel ranks, for `scope: rollout`."""
    assert config.weight is not None
    stage, segments = _staged(proximal, behavior, ragged, config)
    totals = over_sequences(stage, ragged, config)
    pool = Pool(totals, _sequence_weight(totals, config.weight), segments, _keep_sequences(totals, config))
    return _mean_weight(pool, ragged, config.weight)


def kept_tokens(totals: Totals) -> Float[Tensor, " N"]:
    """How many tokens of each sequence the rules over tokens and segments leave; without such, all usable ones."""
    return totals["kept"] if "kept" in totals else totals["usable"]


def kept_in(totals: Totals, keep_sequences: Bool[Tensor, " N"] | None) -> Float[Tensor, " N"]:
    """How many tokens of each sequence all rules leave."""
    kept = kept_tokens(totals)
    return kept if keep_sequences is None else torch.where(keep_sequences, kept, 0)


def denominator_scale(valid: Float[Tensor, " N"], kept: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """What turns a mean over the valid tokens of each sequence into one over the kept: n_valid / n_kept, 0 of none."""
    return torch.where(kept > 0, valid / kept.clamp(min=1), 0)


def _staged(
    proximal: Tensor, behavior: Tensor, ragged: Ragged, config: CorrectionConfig
) -> tuple[TokenStage, SegmentStage | None]:
    stage = token_stage(proximal, behavior, ragged.loss_mask, config)
    return segment_stage(stage, ragged, config) if needs_segments(config) else (stage, None)


def _sequence_weight(totals: Totals, weight: WeightConfig | None) -> Float[Tensor, " N"] | None:
    return unit_weight(totals, weight) if weight is not None and weight.by_sequence else None


def _keep_sequences(totals: Totals, config: CorrectionConfig) -> Bool[Tensor, " N"] | None:
    rules, weight = sequence_rules(config), config.weight
    masks = weight is not None and weight.bound == "mask" and weight.by_sequence
    if not rules and not masks:
        return None
    keep = passing_units(totals, weight) if masks and weight else known(totals)
    for rule in rules:
        keep = passes(aggregate(totals, rule), rule, keep)
    return keep


def _all_rejected(
    totals: Totals, keep_sequences: Bool[Tensor, " N"] | None, sequence_weight: Float[Tensor, " N"] | None
) -> Bool[Tensor, ""]:
    kept = totals["applied"] if "applied" in totals else kept_tokens(totals)
    if sequence_weight is not None:
        kept = kept * sequence_weight
    kept = kept > 0 if keep_sequences is None else (kept > 0) & keep_sequences
    return (totals["valid"] > 0).any() & ~kept.any()


def _nothing_rejected(
    stage: TokenStage, totals: Totals, keep_sequences: Bool[Tensor, " N"] | None, where: Bool[Tensor, ""]
) -> tuple[TokenStage, Totals, Bool[Tensor, " N"] | None]:
    """The same without rejection `where`, one flag for the micro-batch."""
    if stage.keep is not None:
        stage = replace(stage, keep=stage.keep | (where & stage.loss_mask))
    restored = {
        name: torch.where(where, totals[source], totals[name])
        for name, source in UNREJECTED.items()
        if name in totals
    }
    return stage, {**totals, **restored}, None if keep_sequences is None else keep_sequences | where


def _token_weights(
    stage: TokenStage, ragged: Ragged, sequence_weight: Float[Tensor, " N"] | None
) -> Float[Tensor, " T"]:
    if stage.weight is not None:
        return stage.weight
    if sequence_weight is None:
        return stage.usable.float()
    return torch.where(ragged.loss_mask, ragged.to_tokens(sequence_weight.float()), 0)


@dataclass(frozen=True)
class Pool:
    """What a mean of the weights draws from: tokens, segments or sequences, by the level of the weight."""

    totals: Totals
    sequence_weight: Float[Tensor, " N"] | None
    segments: SegmentStage | None
    keep_sequences: Bool[Tensor, " N"] | None


def _mean_weight(pool: Pool, ragged: Ragged, weight: WeightConfig) -> Float[Tensor, ""]:
    """Mean of the bounded weights: over tokens at token level, each live segment or sequence once at the others."""
    assert weight.normalize is not None
    kept_only = weight.normalize.over == "kept"
    if pool.segments is not None and pool.segments.weight is not None:
        total, count = _segment_population(pool, pool.segments, pool.segments.weight, weight, kept_only)
    elif pool.sequence_weight is not None:
        total, count = _sequence_population(pool, pool.sequence_weight, weight, kept_only)
    else:
        total, count = _token_population(pool, weight, kept_only)
    both = torch.stack([total, count])
    return normalization(ragged.over_batch(both) if weight.normalize.scope != "micro_batch" else both.sum(-1))


def _token_population(pool: Pool, weight: WeightConfig, kept_only: bool) -> tuple[Tensor, Tensor]:
    """Sum of token weights and their number, by sequence."""
    totals = pool.totals
    if kept_only:
        both = totals["applied"], kept_tokens(totals)
        keep = pool.keep_sequences
        return both if keep is None else (torch.where(keep, both[0], 0), torch.where(keep, both[1], 0))
    if weight.bound == "mask":
        return totals["counted_weight"], totals["counted"]
    return totals["weight"], totals["usable"]


def _sequence_population(
    pool: Pool, sequence_weight: Float[Tensor, " N"], weight: WeightConfig, kept_only: bool
) -> tuple[Tensor, Tensor]:
    counted = counted_units(pool.totals, weight)
    if kept_only:
        counted = counted & (kept_in(pool.totals, pool.keep_sequences) > 0)
    return torch.where(counted, sequence_weight, 0), counted.double()


def _segment_population(
    pool: Pool, segments: SegmentStage, bounded: Float[Tensor, " S"], weight: WeightConfig, kept_only: bool
) -> tuple[Tensor, Tensor]:
    counted = counted_units(segments.totals, weight)
    if kept_only:
        counted = counted & segments.keep
        if pool.keep_sequences is not None:
            counted = counted & pool.keep_sequences.index_select(0, segments.segments.owner)
    return torch.where(counted, bounded, 0), counted.double()
