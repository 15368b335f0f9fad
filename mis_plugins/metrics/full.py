"""The metrics of a token that `metrics: full` hands back beyond `core` and a default log.

Perplexities, the weight before and after its bound, and what each rule drops: the file is loaded where a config asks
for them.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, RejectRule, WeightConfig
from mis_plugins.correction import rejection
from mis_plugins.correction.pipeline import Correction
from mis_plugins.correction.plan import monotone, weighs_tokens, zero_weights
from mis_plugins.correction.ratios import exp_clamped, log_bound, saturated, share_above, share_below
from mis_plugins.metrics.token_metrics import PPL_RATIO, SATURATED, Catalogue, Side, Value, end_of, of


def metrics_of(config: CorrectionConfig) -> Catalogue:
    """The metrics that a config has with `metrics: full`, and not with `core`."""
    always = FULL | (FULL_OF_CORRECTION if config.corrects else {})
    return always | _weight_metrics(config.weight) | _rule_metrics(config.reject)


def final_mean(c: Correction) -> Float[Tensor, " N"]:
    """Mean over the sequence of the weights as multiplied into the loss, dropped tokens included."""
    if c.sequence_weight is not None and c.stage.weight is None:
        return _normalized(c, c.sequence_weight)
    total = c.totals["usable"] if c.stage.weight is None else c.totals["weight"]
    return _normalized(c, _of_sequence(c, total / c.totals.size))


def ratio_min(c: Correction) -> Float[Tensor, ""]:
    """Smallest token ratio before any bound, its log clamped at -20; 0 where no token is usable."""
    row = c.totals["log_ratio_min"]
    smallest = row.amin() if row.numel() else row.new_full((), torch.inf)
    return exp_clamped(smallest) * (smallest < torch.inf)


def kept_sequences(c: Correction) -> Float[Tensor, ""]:
    """Share of the sequences with a valid token that the rules over sequences keep."""
    kept = c.any_valid if c.keep_sequences is None else c.any_valid & c.keep_sequences
    return kept.sum() / c.sequence_count


SEQUENCE = of(
    "sequence",
    training_log_ppl=lambda c: -c.means.proximal,
    training_ppl=lambda c: c.means.perplexities[0],
    rollout_log_ppl=lambda c: -c.means.behavior,
    rollout_ppl=lambda c: c.means.perplexities[1],
    log_ppl_diff=lambda c: -c.means.log_ratio,  # above 0 where the trainer is the more surprised
    log_ppl_abs_diff=lambda c: c.means.log_ratio.abs(),
    chi2_token=lambda c: c.totals["ratio_squared"] / c.usable_count - 1,
    chi2_seq=lambda c: exp_clamped(c.totals["log_ratio"]).square() - 1,
)
FULL = SATURATED | SEQUENCE | PPL_RATIO | of("micro_batch", ratio_min_mb=ratio_min)
FULL_OF_CORRECTION = of(
    "micro_batch",
    weight_max_mb=lambda c: end_of(_extreme_passing(c, "max"), "max"),
    weight_min_mb=lambda c: end_of(_extreme_passing(c, "min"), "min"),
    kept_sequences_mb=kept_sequences,
)


def _weight_metrics(weight: WeightConfig | None) -> Catalogue:
    """Metrics of the weight before and after its bound, of what the bound changed, and of the weight in the loss."""
    if weight is None:
        return {}
    final = of(
        "sequence",
        is_ratio_mean_final=final_mean,
        is_ratio_min_final=lambda c: torch.where(c.totals.known, _extreme_weight(c, "min"), 0),
        is_ratio_max_final=lambda c: _extreme_weight(c, "max"),
    )
    if weight.by_sequence:
        log_ratio = lambda c: rejection.known_log_ratio(c.unit_totals, weight)  # noqa: E731
        before = lambda c: rejection.unit_ratio(c.unit_totals, weight)  # noqa: E731
        far = {"saturated_sequence_fraction": lambda c: saturated(log_ratio(c))}
        bounded = _around_bound(weight, log_ratio, before, lambda c: c.sequence_weight)
        return of("sequence", **far, **bounded) | final
    bounded = _around_bound(weight, _of_unit, _token_ratio(weight), lambda c: c.stage.bounded)
    if weight.by_segment:
        bounded["saturated_segment_fraction"] = lambda c: saturated(_of_unit(c))
    return of("token", **bounded) | final


def _around_bound(weight: WeightConfig, log_ratio: Value, before: Value, after: Any) -> dict[str, Value]:
    """Metrics of a weight, per token or per sequence as the weight is, before and after its bound."""
    metrics: dict[str, Value] = {
        "tis_weight_before_bound": before,
        "tis_weight_after_bound": after,
        "is_ratio_mean_after_tis_rs": after,
    }
    low = lambda c: share_below(log_ratio(c), log_bound(weight.floor))  # noqa: E731
    high = lambda c: share_above(log_ratio(c), log_bound(weight.ceiling))  # noqa: E731
    if not weight.record.has_ceiling:
        return metrics
    if not weight.record.has_floor:
        return metrics | {f"tis_{weight.bound}_fraction": high}
    return metrics | {f"tis_{weight.bound}_fraction_low": low, f"tis_{weight.bound}_fraction_high": high}


def _rule_metrics(rules: Iterable[RejectRule]) -> Catalogue:
    """Metrics of what each rule would drop alone. The second rule of a kind has the suffix `_2`."""
    catalogue, numbers = Catalogue(), Counter[bool]()
    for rule in rules:
        is_veto = rule.over == "min" and rule.upper is None and rule.unit == "sequence"
        numbers[is_veto] += 1
        suffix = f"_{numbers[is_veto]}" if numbers[is_veto] > 1 else ""
        metrics = _veto_metrics(rule) if is_veto else _bound_metrics(rule)
        catalogue |= {name + suffix: metric for name, metric in metrics.items()}
    return catalogue


def _veto_metrics(rule: RejectRule) -> Catalogue:
    of_token = replace(rule, over="token", aggregate=None)
    return of("token", rs_catastrophic_token_fraction=_outside(of_token)["low"]) | of(
        "sequence", rs_catastrophic_seq_fraction=_outside(rule)["low"]
    )


def _bound_metrics(rule: RejectRule) -> Catalogue:
    shares = {f"rs_mask_fraction_{side}": value for side, value in _outside(rule).items()}
    by_token = rule.over == "token" or rule.unit == "segment"
    return of("token", **shares) if by_token else of("sequence", **shares)


def _outside(rule: RejectRule) -> dict[str, Value]:
    """The shares below the rule's lower bound and above its upper bound, as far as it has them."""
    lower, upper = rule.limits
    shares: dict[str, Value] = {}
    if lower is not None:
        shares["low"] = lambda c: share_below(compared(c, rule), lower)
    if upper is not None:
        shares["high"] = lambda c: share_above(compared(c, rule), upper)
    return shares


def compared(c: Correction, rule: RejectRule) -> Tensor:
    """Values that a rule compares with its limits: per token, or per sequence where the rule drops sequences."""
    if rule.over == "token":
        return c.stage.statistic(rule.statistic)
    population = c.config.population(rule)
    if rule.unit == "segment":
        assert c.segments is not None
        totals = c.segments.by_population[population]
        return _at_tokens(c, lambda _: _of_units(c, totals, rule))
    return _of_units(c, c.by_population[population], rule)


def _of_units(c: Correction, totals: rejection.Totals, rule: RejectRule) -> Tensor:
    value = rejection.aggregate(totals, rule)
    if c.config.population(rule) == "valid":
        return value
    return torch.where(totals["valid"] > 0, value, torch.nan)  # NaN lies neither below nor above a bound


def _normalized(c: Correction, weight: Tensor) -> Tensor:
    return weight if c.mean_weight is None else weight / c.mean_weight


def _token_ratio(weight: WeightConfig) -> Value:
    if weight.level == "token":
        return lambda c: c.stage.weighed
    return lambda c: _at_tokens(c, lambda totals: rejection.unit_ratio(totals, weight))


def _at_tokens(c: Correction, of_segment: Callable[[rejection.Totals], Tensor]) -> Float[Tensor, " T"]:
    """Give each token the number of its segment; a masked token gets the number of some segment."""
    assert c.segments is not None
    return c.segments.segments.ragged.to_tokens(of_segment(c.segments.totals).float())


def _of_unit(c: Correction) -> Float[Tensor, " T"]:
    assert c.stage.unit_log_ratio is not None
    return c.stage.unit_log_ratio


def _extreme_weight(c: Correction, side: Side) -> Float[Tensor, " N"]:
    """Smallest or largest weight of each sequence; some finite number where a sequence has no usable token."""
    if not weighs_tokens(c.config):
        weight = torch.ones_like(c.totals["valid"]) if c.sequence_weight is None else c.sequence_weight
        return _normalized(c, weight)
    if c.config.weight is not None and monotone(c.config):
        ratio = c.totals["ratio_max"] if side == "max" else c.totals.ratio_min
        return _normalized(c, rejection.applied_bound(ratio, c.config.weight))
    row = c.totals[f"{'weight' if zero_weights(c.config) else 'passing_weight'}_{side}"]
    return _normalized(c, _of_sequence(c, row.nan_to_num(posinf=0.0, neginf=0.0)))


def _extreme_passing(c: Correction, side: Side) -> Float[Tensor, " N"]:
    """Smallest or largest weight of each sequence that a mask or zero bound lets pass; infinite where none passes."""
    weight = c.config.weight
    units = weight if weight and weight.by_sequence else None
    if weighs_tokens(c.config) and not monotone(c.config) and units is None:
        return _normalized(c, c.totals[f"passing_weight_{side}"])
    if weighs_tokens(c.config) and weight and weight.record.drops_token and units is None:
        row = c.totals[f"passing_{side}"]
        exists, extreme = row.abs() < torch.inf, _normalized(c, rejection.applied_bound(exp_clamped(row), weight))
    else:
        exists = rejection.passing_units(c.unit_totals, units) if units else c.totals.any_usable
        extreme = _extreme_weight(c, side)
    return torch.where(exists, extreme, torch.inf if side == "min" else -torch.inf)


def _of_sequence(c: Correction, own: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """A number made of the weights of a sequence's tokens, times the weight of the sequence where it has one."""
    return own if c.sequence_weight is None else own * c.sequence_weight
