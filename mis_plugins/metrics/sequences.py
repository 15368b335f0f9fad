"""The quantities of sequences and segments, equal on all context-parallel ranks. One rank counts them."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, Population, RejectRule, Unit
from mis_plugins.config.terms.statistics import row_of
from mis_plugins.correction.pipeline import Correction
from mis_plugins.correction.plan import weighs_tokens
from mis_plugins.correction.ratios import LOG_RATIO_CLAMP, exp_clamped, log_bound
from mis_plugins.correction.rejection import Totals, aggregate, known_log_ratio, passes
from mis_plugins.metrics import quantity as take
from mis_plugins.metrics.quantity import Metrics, Quantity
from mis_plugins.metrics.tokens import beyond, bounded, rules, weight_limits

if TYPE_CHECKING:
    from mis_plugins.correction.opsm import Departure
else:
    Departure = Any  # loaded where a config has OPSM

OF_MEAN_LOG_RATIO = {
    "log_ppl_diff": take.minus_mean,
    "log_ppl_diff_max": take.smallest.then(float.__neg__),
    "log_ppl_diff_min": take.largest.then(float.__neg__),
    **take.percentiles("geometric_ratio", take.exp_of),
}
OF_LOG_RATIO = {
    "sequence_log_ratio_mean": take.mean,
    "sequence_log_ratio_min": take.smallest,
    "sequence_log_ratio_max": take.largest,
    **take.percentiles("sequence_log_ratio"),
}
OF_WEIGHT = {
    "sequence_weight_mean": take.mean,
    "sequence_weight_std": take.unbiased_std,
    "sequence_weight_min": take.smallest,
    "sequence_weight_max": take.largest,
    "sequence_weight_max_deviation": take.from_one,
}
OF_KEPT_WEIGHT = {
    "sequence_applied_mean": take.mean,
    "sequence_applied_min": take.smallest,
    "sequence_applied_max": take.largest,
}
Sequence = partial(Quantity, over="any_usable")


def of_sequences(c: Correction) -> Iterator[Quantity]:
    """Quantities of sequences with a usable token; a mean is over usable tokens."""
    yield Quantity("any_usable", c.totals.any_usable, also="sum")
    yield from _mismatch(c)
    yield from _weights(c)


def _mismatch(c: Correction) -> Iterator[Quantity]:
    means, log_ratio = c.means, c.totals["log_ratio"]
    far = log_ratio.abs()
    yield Sequence("mean_log_ratio", means.log_ratio, OF_MEAN_LOG_RATIO)
    yield Sequence("abs_mean_log_ratio", means.log_ratio.abs(), {"log_ppl_abs_diff": take.mean})
    yield Sequence("mean_proximal", means.proximal, {"train_log_ppl": take.minus_mean})
    yield Sequence("mean_behavior", means.behavior, {"rollout_log_ppl": take.minus_mean})
    for name, values in zip(("train_ppl", "rollout_ppl", "ppl_ratio"), means.perplexities, strict=True):
        yield Sequence(name, values, {name: take.mean})
    yield Sequence("geometric", exp_clamped(means.log_ratio), {"chi2_geometric": take.chi2})
    yield Sequence("product", exp_clamped(log_ratio), {"chi2_sequence": take.chi2})
    yield Sequence("sequence_log_ratio", log_ratio, OF_LOG_RATIO)
    yield Sequence("abs_sequence_log_ratio", far, {"sequence_log_ratio_abs_mean": take.mean})
    yield Sequence("saturated_sequences", far > LOG_RATIO_CLAMP, {"saturated_sequences": take.mean})
    for name, rule in rules(c.config):
        if rule.over == "token":
            row = row_of(rule.statistic)
            values = means.log_ratio if row == "log_ratio" else c.totals[row] / c.usable_count
            yield from _compared(name, rule, values, _untouched(c.totals, rule), "any_usable", "", {})


def _weights(c: Correction) -> Iterator[Quantity]:
    """Means over a sequence's valid tokens of their weights: before normalization, and as multiplied into the loss."""
    totals, weight = c.totals, c.config.weight
    mean_weight = totals["weight" if weighs_tokens(c.config) else "usable"] / totals.size
    mean_weight = mean_weight if c.sequence_weight is None else mean_weight * c.sequence_weight
    yield Sequence("sequence_weight", mean_weight, OF_WEIGHT)
    yield Sequence("sequence_kept_weight", _kept_weight(c) / totals.size, OF_KEPT_WEIGHT)
    if weight is None:
        return
    stem, limits = "sequence_ratio_{side}_fraction", weight_limits(weight)
    if not weight.by_sequence:
        ratio = totals["weighed"] / totals.size
        yield from beyond(stem, ratio, (math.exp(limits[0]), math.exp(limits[1])), "any_usable")
        return
    unit = known_log_ratio(c.unit_totals, weight)
    for name in (stem, "weight_{side}_fraction"):
        yield from beyond(name, unit, limits, "any_usable")
    outside = (unit < log_bound(weight.floor)) | (unit > log_bound(weight.ceiling))
    yield Quantity("outside_bound", outside * totals["usable"], {"outside_bound_fraction": take.mean})


def _kept_weight(c: Correction) -> Float[Tensor, " N"]:
    """Sum of the weights of each sequence's tokens as multiplied into the loss, 0 where dropped."""
    if c.after_opsm is not None:
        return c.after_opsm.weight
    total = c.of_kept_sequences(c.totals["kept_weight"]) if weighs_tokens(c.config) else c.kept_usable
    total = total if c.sequence_weight is None else total * c.sequence_weight
    return total if c.mean_weight is None else total / c.mean_weight


def of_valid_sequences(c: Correction) -> Iterator[Quantity]:
    """Quantities of sequences with a valid token; 0 of the others."""
    kept = c.kept_usable if c.after_opsm is None else c.after_opsm.usable
    yield Quantity("any_valid", c.any_valid, {"sequences": take.total})
    yield Quantity("nonfinite_train", c.totals["nonfinite_train"], {"nonfinite_train_tokens": take.total})
    yield Quantity("nonfinite_rollout", c.totals["nonfinite_rollout"], {"nonfinite_rollout_tokens": take.total})
    yield Quantity("kept_sequences", kept > 0, {"kept_sequences": take.mean}, over="any_valid")
    yield Quantity("touched_sequences", kept < c.totals["valid"], {"touched_sequences": take.mean}, over="any_valid")
    if c.departure is not None:
        unknown = c.departure.divergence.isinf() & c.any_valid
        yield Quantity("opsm_unknown", unknown, {"opsm_unknown_sequences": take.total})


# What each rule would drop alone.


def _compared(
    name: str, rule: RejectRule, values: Tensor, untouched: Tensor, over: str, by_tokens: str, more: Metrics
) -> Iterator[Quantity]:
    """What a rule compares, or would compare, of units, and the units that it leaves as they are."""
    unit = f"{name}_unit"
    metrics = {
        f"{unit}_mean": take.mean,
        f"{unit}_std": take.unbiased_std,
        f"{unit}_min": take.smallest,
        f"{unit}_max": take.largest,
    }
    yield Quantity(unit, values, metrics | {f"{unit}_max_deviation": take.size} | more, over)
    yield from beyond(unit + "_{side}_fraction", values, rule.limits, over, by_tokens)
    yield Quantity(f"{unit}_untouched", untouched, {f"{unit}_rejected_fraction": take.rest}, over)


def _untouched(totals: Totals, rule: RejectRule) -> Bool[Tensor, " N"]:
    """Sequences that lose no token to a rule over tokens."""
    row, (lower, upper) = row_of(rule.statistic), rule.limits
    kept = totals.known
    if lower is not None:
        kept = kept & (totals[f"{row}_min"] >= lower)
    return kept if upper is None else kept & (totals[f"{row}_max"] <= upper)


def of_unit_rule(name: str, rule: RejectRule, totals: Totals) -> Iterator[Quantity]:
    """Quantities of units with a usable token, of which a rule drops some; without `unit` by valid tokens."""
    compared, count = aggregate(totals, rule), f"{name}_units"
    kept = passes(compared, rule, totals.known)
    values = torch.where(totals.any_usable, compared, 0)  # extremes of no token are infinite
    yield Quantity(count, totals.any_usable, also="sum")
    more = {f"{name}_mean": take.mean_by_tokens, f"{name}_min": take.smallest, f"{name}_max": take.largest}
    yield from _compared(name, rule, values, kept, count, name + "_{side}_fraction", more)
    yield Quantity(f"{name}_bounded", bounded(values, rule), {f"{name}_std": take.std_by_tokens}, count)


def multiplies(config: CorrectionConfig) -> tuple[Unit, Population] | None:
    """Unit and population of tokens of the longest product of ratios that a weight or rule takes; None without one."""
    multiplying = [rule for rule in config.reject if rule.multiplies]
    products: list[tuple[Unit, Population]] = [(rule.unit, config.population(rule)) for rule in multiplying]
    weight = config.weight
    if weight and (weight.level == "sequence" or weight.level == "segment"):
        products.append((weight.level, config.weight_population))
    return min(products, key=lambda product: (product[0] != "sequence", product[1] != "valid"), default=None)


def of_product(totals: Totals) -> Iterator[Quantity]:
    """Quantities of units with a usable token whose ratios are multiplied."""
    far = totals["log_ratio"].abs()
    yield Quantity("product_count", totals.any_usable, also="sum")
    yield Quantity("product_size", far, also="sum")
    yield Quantity("product_saturated", far > LOG_RATIO_CLAMP, also="sum")


DEPARTURES: dict[str, Callable[[Departure], Float[Tensor, " N"]]] = {
    "opsm_divergence": lambda d: d.divergence,
    "opsm_divergence_negative": lambda d: torch.where(d.advantage < 0, d.divergence, torch.inf),
    "opsm_divergence_positive": lambda d: torch.where(d.advantage > 0, d.divergence, torch.inf),
    "opsm_mismatch": lambda d: d.mismatch,
    "opsm_staleness": lambda d: d.staleness,
}
"""Numbers of a sequence that OPSM's metrics are made of; infinite where the number does not exist or is unknown."""


def of_departure(name: str, values: Float[Tensor, " N"]) -> Iterator[Quantity]:
    """Quantities of the sequences that have one of the numbers of `DEPARTURES`."""
    yield Quantity(f"{name}_count", torch.ones_like(values), also="sum")
    yield Quantity(name, values, {f"{name}_mean": take.mean} | take.percentiles(name), f"{name}_count")
