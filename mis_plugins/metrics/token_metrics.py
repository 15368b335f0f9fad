"""How bad the mismatch is and what the correction did about it, read from a finished `Correction`.

There are three kinds of metric. A metric per token or per sequence becomes a mean over tokens or sequences when a host
averages it over the loss mask. A metric per micro-batch (`_mb`) has one value on every token, exact over
context-parallel ranks; a host averages it over micro-batches, weighted by their tokens or samples.

A name that Miles's `mis.py` has means what it means there. A host divides by fully masked samples too, which lowers
metrics of these names. All other metrics are scaled back, by what is known within a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, RejectRule, WeightConfig
from mis_plugins.config.terms.divergence import k1, k3
from mis_plugins.correction.pipeline import Correction, kept_below
from mis_plugins.correction.ratios import (
    exp_clamped,
    exp_finite,
    log_bound,
    saturated,
    share_above,
    share_below,
)
from mis_plugins.correction.rejection import Totals, aggregate, passing_units
from mis_plugins.correction.sequence_totals import monotone, weighs_tokens, zero_weights
from mis_plugins.correction.weights import applied_bound, known_log_ratio, unit_ratio
from mis_plugins.packing.ragged import as_bytes

Metric = Callable[[Correction], Tensor | None]  # None only where the config has no such metric
Average = Literal["sequences", "tokens"] | Tensor  # a 0-d tensor: the share of the step that trains

OF_MIS_PY = frozenset(
    """training_log_ppl training_ppl rollout_log_ppl rollout_ppl kl k3_kl log_ppl_diff log_ppl_abs_diff ppl_ratio
    chi2_token chi2_seq tis_weight_before_bound tis_weight_after_bound tis_truncate_fraction tis_clip_fraction_low
    tis_clip_fraction_high tis_mask_fraction_low tis_mask_fraction_high rs_mask_fraction_low rs_mask_fraction_high
    rs_catastrophic_token_fraction rs_catastrophic_seq_fraction batch_norm_factor is_ratio_mean_after_tis_rs
    is_ratio_mean_final is_ratio_min_final is_ratio_max_final""".split()
)
"""Names of Miles's `mis.py`, with the meaning that they have there: a fully masked sample counts as 0."""


@dataclass(frozen=True)
class Catalogue:
    """The metrics of one config as functions of the Correction, by whether a token, sequence or micro-batch has one."""

    token: Mapping[str, Metric] = field(default_factory=dict)
    sequence: Mapping[str, Metric] = field(default_factory=dict)
    micro_batch: Mapping[str, Metric] = field(default_factory=dict)

    def __or__(self, other: Catalogue) -> Catalogue:
        """Metrics of two catalogues together."""
        return Catalogue(
            {**self.token, **other.token},
            {**self.sequence, **other.sequence},
            {**self.micro_batch, **other.micro_batch},
        )


class TokenMetrics(Mapping[str, Tensor]):
    """Every metric as the host wants it: a local `[T]` tensor, made when it is read.

    A host reads one metric, reduces it and drops it, so that the twenty-odd tensors of a batch never exist together.
    Metrics per sequence are computed together when the first of them is read; so are metrics per micro-batch.
    """

    def __init__(
        self, correction: Correction, catalogue: Catalogue, prefix: str, average: Average | None = None
    ):
        self._correction, self._catalogue, self._prefix = correction, catalogue, prefix
        self._average: Average | None = average

    @cached_property
    def _of_sequence(self) -> dict[str, Float[Tensor, " N"]]:
        metrics = self._catalogue.sequence
        return dict(zip(metrics, _stacked(self._correction, metrics).float().unbind(), strict=True))

    @cached_property
    def _of_micro_batch(self) -> dict[str, Float[Tensor, " T"]]:
        c, metrics = self._correction, self._catalogue.micro_batch
        tokens = c.ragged.loss_mask.numel()
        theirs = {name: metric for name, metric in metrics.items() if name in OF_MIS_PY}
        ours = {name: metric for name, metric in metrics.items() if name not in OF_MIS_PY}
        values = _stacked(c, ours) if self._share is None else _stacked(c, ours) / self._share
        at_tokens = values.float().unsqueeze(1).expand(-1, tokens).unbind()  # not one operator each
        found = {name: _value(c, metric).float().expand(tokens) for name, metric in theirs.items()}
        return found | dict(zip(ours, at_tokens, strict=True))

    @cached_property
    def _share(self) -> Float[Tensor, ""] | None:
        return _live_share(self._correction, self._average)

    def __getitem__(self, name: str) -> Float[Tensor, " T"]:
        if not name.startswith(self._prefix):
            raise KeyError(name)
        metric, ragged = name.removeprefix(self._prefix), self._correction.ragged
        if metric in self._catalogue.micro_batch:
            return self._of_micro_batch[metric]
        if metric in self._catalogue.token:
            value = _value(self._correction, self._catalogue.token[metric])
        else:
            value = ragged.to_tokens(self._of_sequence[metric])
        share = None if metric in OF_MIS_PY else self._share
        return (value if share is None else value / share).float()

    def __iter__(self) -> Iterator[str]:
        kinds = self._catalogue.token, self._catalogue.sequence, self._catalogue.micro_batch
        return (self._prefix + name for name in itertools.chain(*kinds))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def scaled_back(
    value: Float[Tensor, " T"], correction: Correction, average: Average | None
) -> Float[Tensor, " T"]:
    """A metric of a token, scaled so that fully masked samples of the micro-batch do not lower the host's mean."""
    share = _live_share(correction, average)
    return value if share is None else value / share


def _live_share(c: Correction, average: Average | None) -> Float[Tensor, ""] | None:
    """What the host adds up over what it divides by, in this step where that is known: fully masked samples add 0."""
    if average is None or isinstance(average, Tensor):
        return average
    if average == "sequences":
        return c.sequence_count / c.ragged.size
    valid = c.valid_count.sum().clamp(min=1)
    return (valid / (valid - c.sequence_count + c.ragged.size)).float()


def _stacked(correction: Correction, metrics: Mapping[str, Metric]) -> Float[Tensor, "K ..."]:
    return torch.stack([_value(correction, metric) for metric in metrics.values()])


def _value(correction: Correction, metric: Metric) -> Tensor:
    value = metric(correction)
    assert value is not None
    return value


def diagnose(correction: Correction, prefix: str = "mis_", average: Average | None = None) -> TokenMetrics:
    """The metrics that `config.metrics` asks for. Their names depend on the config alone.

    Args:
        average: what the host takes the mean over. A host counts fully masked samples as 0; metrics that Miles's
            `mis.py` lacks are scaled to undo that, by a share of the step or else of this micro-batch. None leaves
            every metric unscaled.
    """
    return TokenMetrics(correction, catalogue(correction.config), prefix, average)


@cache
def catalogue(config: CorrectionConfig) -> Catalogue:
    """The metrics that a config has."""
    if config.metrics == "none":
        return Catalogue()
    if config.metrics == "watch":
        return WATCH | (WATCH_OF_CORRECTION if config.corrects else Catalogue())
    if config.metrics == "core":
        return CORE | (WATCH_OF_CORRECTION if config.corrects else Catalogue()) | _normalization(config)
    found = FULL | _normalization(config) | (FULL_OF_CORRECTION if config.corrects else Catalogue())
    return found | _weight_metrics(config.weight) | _rule_metrics(config.reject)


# Metrics per token.


def kl(c: Correction) -> Float[Tensor, " T"]:
    """The k1 estimate of KL(mu || pi_old): log mu - log pi_old, of any sign, with a mean near 0 on policy."""
    return k1(c.log_ratio)


def k3_kl(c: Correction) -> Float[Tensor, " T"]:
    """The k3 estimate of KL(mu || pi_old): r - 1 - log r, at least 0, with log r at most 20. (Schulman 2020)"""
    return k3(c.log_ratio)


def kept_fraction(c: Correction) -> Tensor:
    """Tokens that neither a rule nor a mask bound dropped."""
    return as_bytes(c.keep)


# Metrics per sequence.


def training_log_ppl(c: Correction) -> Float[Tensor, " N"]:
    """Mean of -log pi_old over the sequence."""
    return c.log_ppl.training


def rollout_log_ppl(c: Correction) -> Float[Tensor, " N"]:
    """Mean of -log mu over the sequence."""
    return c.log_ppl.rollout


def log_ppl_diff(c: Correction) -> Float[Tensor, " N"]:
    """Mean of log mu - log pi_old: above 0 where the trainer is the more surprised."""
    return c.log_ppl.excess


def chi2_token(c: Correction) -> Float[Tensor, " N"]:
    """Mean over the sequence of r_t^2, less 1."""
    return c.totals["ratio_squared"] / c.usable_count - 1


def chi2_seq(c: Correction) -> Float[Tensor, " N"]:
    """Squared product of the sequence's ratios, less 1, with the log of the product clamped at +-20."""
    return exp_clamped(c.totals["log_ratio"]).square() - 1


def final_mean(c: Correction) -> Float[Tensor, " N"]:
    """Mean over the sequence of the weights as multiplied into the loss, dropped tokens included."""
    if c.sequence_weight is not None and c.stage.weight is None:
        return _normalized(c, c.sequence_weight)
    total = c.totals["usable"] if c.stage.weight is None else c.totals["weight"]
    return _normalized(c, _of_sequence(c, total / c.totals.size))


def final_min(c: Correction) -> Float[Tensor, " N"]:
    """Smallest weight of the sequence as multiplied into the loss; 0 where a valid token is not usable."""
    return torch.where(c.totals.known, _extreme_weight(c, "min"), 0)


def final_max(c: Correction) -> Float[Tensor, " N"]:
    """Largest weight of the sequence as multiplied into the loss."""
    return _extreme_weight(c, "max")


# Metrics per micro-batch.


def ratio_max(c: Correction) -> Float[Tensor, ""]:
    """Largest token ratio before any bound, its log clamped at 20; 0 where no token is usable."""
    return _largest(c.totals["ratio_max"])


def ratio_min(c: Correction) -> Float[Tensor, ""]:
    """Smallest token ratio before any bound, its log clamped at -20; 0 where no token is usable."""
    row = c.totals["log_ratio_min"]
    smallest = row.amin() if row.numel() else row.new_full((), torch.inf)
    return exp_clamped(smallest) * (smallest < torch.inf)


def weight_max(c: Correction) -> Float[Tensor, ""]:
    """Largest weight that passes the bound, normalized."""
    return _largest(_extreme_passing(c, "max"))


def weight_min(c: Correction) -> Float[Tensor, ""]:
    """Smallest weight that passes the bound, normalized."""
    return _smallest(_extreme_passing(c, "min"))


def kept_sequences(c: Correction) -> Float[Tensor, ""]:
    """Share of the sequences with a valid token that the rules over sequences keep."""
    kept = c.any_valid if c.keep_sequences is None else c.any_valid & c.keep_sequences
    return kept.sum() / c.sequence_count


def effective_sample_size(c: Correction) -> Float[Tensor, ""]:
    """Effective sample size of the weights as multiplied into the loss, as a share of the n valid tokens. (Kish)

    ESS / n = (sum w)^2 / (n sum w^2), with w = 0 where a token is dropped.
    """
    total, squares = _applied_moments(c)
    if c.keep_sequences is not None:
        total, squares = (torch.where(c.keep_sequences, x, 0) for x in (total, squares))
    return total.sum() ** 2 / (c.totals["valid"].sum() * squares.sum()).clamp(
        min=torch.finfo(torch.float64).tiny
    )


def nonfinite_train(c: Correction) -> Float[Tensor, ""]:
    """Number of valid tokens whose trainer log-prob is NaN or infinite."""
    return c.totals["nonfinite_train"]


def nonfinite_rollout(c: Correction) -> Float[Tensor, ""]:
    """Number of valid tokens whose rollout log-prob is NaN or infinite."""
    return c.totals["nonfinite_rollout"]


KL: dict[str, Metric] = {"kl": kl, "k3_kl": k3_kl}

SEQUENCE: dict[str, Metric] = {
    "training_log_ppl": training_log_ppl,
    "training_ppl": lambda c: exp_finite(training_log_ppl(c)),
    "rollout_log_ppl": rollout_log_ppl,
    "rollout_ppl": lambda c: exp_finite(rollout_log_ppl(c)),
    "log_ppl_diff": log_ppl_diff,
    "log_ppl_abs_diff": lambda c: log_ppl_diff(c).abs(),
    "ppl_ratio": lambda c: exp_finite(log_ppl_diff(c)),
    "chi2_token": chi2_token,
    "chi2_seq": chi2_seq,
}

NONFINITE: dict[str, Metric] = {
    "nonfinite_train_mb": nonfinite_train,
    "nonfinite_rollout_mb": nonfinite_rollout,
}

WATCH = Catalogue(
    {"k3_kl": k3_kl, "saturated_fraction": lambda c: saturated(c.log_ratio)},
    {"ppl_ratio": SEQUENCE["ppl_ratio"]},
)
WATCH_OF_CORRECTION = Catalogue(
    {"kept_fraction": kept_fraction}, micro_batch={"ess_mb": effective_sample_size}
)
CORE = Catalogue(KL, micro_batch={"ratio_max_mb": ratio_max} | NONFINITE)

FULL = Catalogue(
    KL | {"saturated_fraction": lambda c: saturated(c.log_ratio)},
    SEQUENCE,
    {"ratio_max_mb": ratio_max, "ratio_min_mb": ratio_min} | NONFINITE,
)
FULL_OF_CORRECTION = WATCH_OF_CORRECTION | Catalogue(
    micro_batch={
        "weight_max_mb": weight_max,
        "weight_min_mb": weight_min,
        "kept_sequences_mb": kept_sequences,
    },
)


def _normalization(config: CorrectionConfig) -> Catalogue:
    if config.weight is None or config.weight.normalize is None:
        return Catalogue()
    return Catalogue(micro_batch={"batch_norm_factor": lambda c: c.mean_weight})


def _weight_metrics(weight: WeightConfig | None) -> Catalogue:
    """Metrics of the weight before and after its bound, of what the bound changed, and of the weight in the loss."""
    if weight is None:
        return Catalogue()
    final: dict[str, Metric] = {
        "is_ratio_mean_final": final_mean,
        "is_ratio_min_final": final_min,
        "is_ratio_max_final": final_max,
    }
    if not weight.by_sequence:
        far: dict[str, Metric] = {"saturated_segment_fraction": lambda c: saturated(_of_unit(c))}
        bounded = _around_bound(weight, _of_unit, _token_ratio(weight), lambda c: c.stage.bounded)
        return Catalogue(far | bounded if weight.by_segment else bounded, final)
    log_ratio = lambda c: known_log_ratio(c.verdict.unit_totals, weight)  # noqa: E731
    before = lambda c: unit_ratio(c.verdict.unit_totals, weight)  # noqa: E731
    far = {"saturated_sequence_fraction": lambda c: saturated(log_ratio(c))}
    bounded = _around_bound(weight, log_ratio, before, lambda c: c.sequence_weight)
    return Catalogue(sequence=far | bounded | final)


def _around_bound(
    weight: WeightConfig, log_ratio: Callable[[Correction], Tensor], before: Metric, after: Metric
) -> dict[str, Metric]:
    """Metrics of a weight, per token or per sequence as the weight is, before and after its bound."""
    found: dict[str, Metric] = {
        "tis_weight_before_bound": before,
        "tis_weight_after_bound": after,
        "is_ratio_mean_after_tis_rs": after,
    }
    low = lambda c: share_below(log_ratio(c), log_bound(weight.floor))  # noqa: E731
    high = lambda c: share_above(log_ratio(c), log_bound(weight.ceiling))  # noqa: E731
    if not weight.record.has_ceiling:
        return found
    if not weight.record.has_floor:
        return found | {f"tis_{weight.bound}_fraction": high}
    return found | {f"tis_{weight.bound}_fraction_low": low, f"tis_{weight.bound}_fraction_high": high}


def _rule_metrics(rules: tuple[RejectRule, ...]) -> Catalogue:
    """Metrics of what each rule would drop alone. The second rule of a kind has the suffix `_2`."""
    found = Catalogue()
    for rule, suffix in zip(rules, _suffixes(rules), strict=True):
        found |= _veto_metrics(rule, suffix) if _is_veto(rule) else _bound_metrics(rule, suffix)
    return found


def _veto_metrics(rule: RejectRule, suffix: str) -> Catalogue:
    of_token, _ = _outside(replace(rule, over="token", aggregate=None))
    of_sequence, _ = _outside(rule)
    return Catalogue(
        {f"rs_catastrophic_token_fraction{suffix}": of_token},
        {f"rs_catastrophic_seq_fraction{suffix}": of_sequence},
    )


def _bound_metrics(rule: RejectRule, suffix: str) -> Catalogue:
    low, high = _outside(rule)
    found = {f"rs_mask_fraction_low{suffix}": low} if rule.lower is not None else {}
    found |= {f"rs_mask_fraction_high{suffix}": high} if rule.upper is not None else {}
    by_token = rule.over == "token" or rule.unit == "segment"
    return Catalogue(found) if by_token else Catalogue(sequence=found)


def _outside(rule: RejectRule) -> tuple[Metric, Metric]:
    """Two metrics: the share below the rule's lower bound, and the share above its upper bound."""
    lower, upper = rule.limits
    low = lambda c: None if lower is None else share_below(compared(c, rule), lower)  # noqa: E731
    high = lambda c: None if upper is None else share_above(compared(c, rule), upper)  # noqa: E731
    return low, high


def compared(c: Correction, rule: RejectRule) -> Tensor:
    """Values that a rule compares with its limits: per token, or per sequence where the rule drops sequences."""
    if rule.over == "token":
        return c.stage.statistic(rule.statistic)
    population = c.config.population(rule)
    if rule.unit == "segment":
        assert c.verdict.segments is not None
        totals = c.verdict.segments.by_population[population]
        return _at_tokens(c, lambda _: _of_units(c, totals, rule))
    return _of_units(c, c.verdict.by_population[population], rule)


def _of_units(c: Correction, totals: Totals, rule: RejectRule) -> Tensor:
    value = aggregate(totals, rule)
    if c.config.population(rule) == "valid":
        return value
    return torch.where(totals["valid"] > 0, value, torch.nan)  # NaN lies neither below nor above a bound


def _is_veto(rule: RejectRule) -> bool:
    return rule.over == "min" and rule.upper is None and rule.unit == "sequence"


def _suffixes(rules: tuple[RejectRule, ...]) -> list[str]:
    kinds = [_is_veto(rule) for rule in rules]
    numbers = [kinds[: i + 1].count(kind) for i, kind in enumerate(kinds)]
    return ["" if number == 1 else f"_{number}" for number in numbers]


def _normalized(c: Correction, weight: Tensor) -> Tensor:
    return weight if c.mean_weight is None else weight / c.mean_weight


def _token_ratio(weight: WeightConfig) -> Metric:
    if weight.level == "token":
        return lambda c: c.stage.weighed
    return lambda c: _at_tokens(c, lambda totals: unit_ratio(totals, weight))


def _at_tokens(c: Correction, of_segment: Callable[[Totals], Tensor]) -> Float[Tensor, " T"]:
    """Give each token the number of its segment; a masked token gets the number of some segment."""
    assert c.verdict.segments is not None
    return c.verdict.segments.segments.ragged.to_tokens(of_segment(c.verdict.segments.totals).float())


def _of_unit(c: Correction) -> Float[Tensor, " T"]:
    assert c.stage.unit_log_ratio is not None
    return c.stage.unit_log_ratio


def _extreme_weight(c: Correction, side: Literal["min", "max"]) -> Float[Tensor, " N"]:
    """Smallest or largest weight of each sequence; some finite number where a sequence has no usable token."""
    if not weighs_tokens(c.config):
        weight = torch.ones_like(c.totals["valid"]) if c.sequence_weight is None else c.sequence_weight
        return _normalized(c, weight)
    if c.config.weight is not None and monotone(c.config):
        ratio = c.totals["ratio_max"] if side == "max" else c.totals.ratio_min
        return _normalized(c, applied_bound(ratio, c.config.weight))
    row = c.totals[f"{'weight' if zero_weights(c.config) else 'passing_weight'}_{side}"]
    return _normalized(c, _of_sequence(c, row.nan_to_num(posinf=0.0, neginf=0.0)))


def _extreme_passing(c: Correction, side: Literal["min", "max"]) -> Float[Tensor, " N"]:
    """Smallest or largest weight of each sequence that a mask or zero bound lets pass; infinite where none passes."""
    weight = c.config.weight
    units = weight if weight and weight.by_sequence else None
    if weighs_tokens(c.config) and not monotone(c.config) and units is None:
        return _normalized(c, c.totals[f"passing_weight_{side}"])
    if weighs_tokens(c.config) and weight and weight.record.drops_token and units is None:
        row = c.totals[f"passing_{side}"]
        exists, extreme = row.abs() < torch.inf, _normalized(c, applied_bound(exp_clamped(row), weight))
    else:
        exists = passing_units(c.verdict.unit_totals, units) if units else c.totals.any_usable
        extreme = _extreme_weight(c, side)
    return torch.where(exists, extreme, torch.inf if side == "min" else -torch.inf)


def _of_sequence(c: Correction, own: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """A number made of the weights of a sequence's tokens, times the weight of the sequence where it has one."""
    return own if c.sequence_weight is None else own * c.sequence_weight


def _largest(value: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    """Largest value over sequences; 0 where no sequence has one."""
    return value.amax().nan_to_num(neginf=0.0) if value.numel() else value.sum()


def _smallest(value: Float[Tensor, " N"]) -> Float[Tensor, ""]:
    return value.amin().nan_to_num(posinf=0.0) if value.numel() else value.sum()


def _applied_moments(c: Correction) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Sum and sum of squares of the weights of each sequence's kept tokens, before the common normalization."""
    kept = kept_below(c.totals)
    total, squares = (c.totals.get(name, kept) for name in ("kept_weight", "kept_weight_squared"))
    if c.sequence_weight is None:
        return total, squares
    return c.sequence_weight * total, c.sequence_weight.square() * squares
