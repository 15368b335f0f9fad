"""The correction of one micro-batch, read from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config import LEVEL_OVER, CorrectionConfig, WeightConfig
from mis_plugins.errors import InputError
from mis_plugins.ragged import Ragged
from mis_plugins.ratios import exp_clamped
from mis_plugins.rejection import STATISTICS, Totals, passes
from mis_plugins.totals import LogProbs, TokenStage, over_sequences, token_stage
from mis_plugins.weights import bounded_weight, in_bounds, normalization


@dataclass(frozen=True)
class Correction:
    """What a micro-batch's loss is multiplied by and what of it stays.

    weights: w_t, without gradient; 0 outside loss_mask and where the ratio is not known.
    keep_tokens: what a rule over tokens (or a token-level mask bound) leaves; None where there is none.
    keep_sequences: what the rules over sequences leave; None where there is none.
    mean_weight: what the weights were divided by; None without normalization.
    sequence_weight: bounded and not yet normalized, at sequence and geometric level; None at token level.
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
    stage = token_stage(proximal, behavior, ragged.loss_mask, config)
    totals = over_sequences(stage, LogProbs(proximal, behavior), ragged, config)
    sequence_weight = _sequence_weight(totals, config.weight)
    keep_sequences = _keep_sequences(totals, config)
    weights = _token_weights(stage, ragged, sequence_weight)
    mean = rollout_mean if normalize else None
    if config.weight and normalize and normalize.scope != "rollout":
        mean = _mean_weight(totals, sequence_weight, keep_sequences, ragged, config.weight)
    if mean is not None:
        weights = weights / mean
    return Correction(config, ragged, stage, totals, weights, keep_sequences, mean, sequence_weight)


@torch.no_grad()
def mean_weight_of(
    proximal: Float[Tensor, " T"], behavior: Float[Tensor, " T"], ragged: Ragged, config: CorrectionConfig
) -> Float[Tensor, ""]:
    """The mean bounded weight of a whole batch over data-parallel ranks, for `scope: rollout`."""
    assert config.weight is not None
    stage = token_stage(proximal, behavior, ragged.loss_mask, config)
    totals = over_sequences(stage, LogProbs(proximal, behavior), ragged, config)
    sequence_weight = _sequence_weight(totals, config.weight)
    return _mean_weight(totals, sequence_weight, _keep_sequences(totals, config), ragged, config.weight)


def sequence_log_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """log r of the whole sequence: the sum, or its mean over the valid tokens."""
    return STATISTICS[LEVEL_OVER[weight.level]](totals)


def sequence_ratio(totals: Totals, weight: WeightConfig) -> Float[Tensor, " N"]:
    """exp of it, clamped; 0 where it is not known."""
    return torch.where(known(totals), exp_clamped(sequence_log_ratio(totals, weight)), 0)


def known(totals: Totals) -> Bool[Tensor, " N"]:
    """Sequences with a valid token, all of whose log ratios are finite."""
    return (totals["valid"] > 0) & (totals["usable"] == totals["valid"])


def kept_tokens(totals: Totals) -> Float[Tensor, " N"]:
    """How many tokens of each sequence the rules over tokens leave; without such a rule, all usable ones."""
    return totals["kept"] if "kept" in totals else totals["usable"]


def _sequence_weight(totals: Totals, weight: WeightConfig | None) -> Float[Tensor, " N"] | None:
    if weight is None or weight.level == "token":
        return None
    return bounded_weight(sequence_ratio(totals, weight), known(totals), weight)


def _keep_sequences(totals: Totals, config: CorrectionConfig) -> Bool[Tensor, " N"] | None:
    rules = [rule for rule in config.reject if rule.over != "token"]
    masks = config.weight is not None and config.weight.bound == "mask" and config.weight.level != "token"
    if not rules and not masks:
        return None
    keep = known(totals)
    for rule in rules:
        keep = passes(STATISTICS[rule.over](totals), rule, keep)
    return keep & counted_sequences(totals, config.weight) if masks else keep


def counted_sequences(totals: Totals, weight: WeightConfig | None) -> Bool[Tensor, " N"]:
    """Sequences that a mean of sequence weights counts: known, and not dropped by a mask bound."""
    assert weight is not None
    if weight.bound != "mask":
        return known(totals)
    return known(totals) & in_bounds(sequence_log_ratio(totals, weight), weight)


def _token_weights(
    stage: TokenStage, ragged: Ragged, sequence_weight: Float[Tensor, " N"] | None
) -> Float[Tensor, " T"]:
    if stage.weight is not None:
        return stage.weight
    if sequence_weight is None:
        return stage.usable.float()
    return torch.where(ragged.loss_mask, ragged.to_tokens(sequence_weight.float()), 0)


def _mean_weight(
    totals: Totals,
    sequence_weight: Float[Tensor, " N"] | None,
    keep_sequences: Bool[Tensor, " N"] | None,
    ragged: Ragged,
    weight: WeightConfig,
) -> Float[Tensor, ""]:
    """Mean of the bounded weights: over tokens at token level, each sequence once at the others."""
    assert weight.normalize is not None
    kept_only = weight.normalize.over == "kept"
    if sequence_weight is None:
        total, count = _token_population(totals, kept_only, weight)
        counted = None
    else:
        counted = counted_sequences(totals, weight)
        if kept_only:
            counted = counted & (kept_tokens(totals) > 0)
        total, count = sequence_weight, torch.ones_like(sequence_weight)
    for keep in (counted, keep_sequences if kept_only else None):
        if keep is not None:
            total, count = torch.where(keep, total, 0), torch.where(keep, count, 0)
    both = torch.stack([total, count])
    return normalization(ragged.over_batch(both) if weight.normalize.scope != "micro_batch" else both.sum(-1))


def _token_population(
    totals: Totals, kept_only: bool, weight: WeightConfig
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Sum of token weights and their number, by sequence."""
    if kept_only:
        return totals["applied"], kept_tokens(totals)
    if weight.bound == "mask":
        return totals["counted_weight"], totals["counted"]
    return totals["weight"], totals["usable"]
