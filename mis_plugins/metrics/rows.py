"""Rows of numbers over tokens and over sequences, whose float64 sums and maxima make a step's metrics.

Rows over tokens are local to a rank. Rows over sequences are equal on all context-parallel ranks, so that only one of
the ranks may count them. The names of the rows depend on the config alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, Population, RejectRule, Unit, WeightConfig
from mis_plugins.config.terms.divergence import k3
from mis_plugins.config.terms.statistics import row_of
from mis_plugins.correction.pipeline import Correction, LogPerplexity
from mis_plugins.correction.plan import weighs_tokens
from mis_plugins.correction.ratios import LOG_RATIO_CLAMP, exp_clamped, exp_finite, log_bound
from mis_plugins.correction.rejection import Totals, aggregate, known_log_ratio, passes

if TYPE_CHECKING:
    from mis_plugins.correction.opsm import Departure
else:
    Departure = Any  # loaded where a config has OPSM

LOG_RATIO_TAILS = (0.1, 1.0)
PROB_DIFF_TAILS = (0.05, 0.2, 0.5)


@dataclass(frozen=True)
class Tokens:
    """The local tokens of one micro-batch. A number reads 0 at tokens that are not usable.

    pg_loss: the loss before correction, without gradient; None where the host did not hand it over.
    """

    correction: Correction
    pg_loss: Float[Tensor, " T"] | None = None

    @property
    def config(self) -> CorrectionConfig:
        return self.correction.config

    @property
    def usable(self) -> Bool[Tensor, " T"]:
        return self.correction.stage.usable

    @cached_property
    def log_ratio(self) -> Float[Tensor, " T"]:
        return self.correction.log_ratio.double()

    @cached_property
    def clamped(self) -> Float[Tensor, " T"]:
        return self.log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)

    @cached_property
    def abs_log_ratio(self) -> Float[Tensor, " T"]:
        return self.log_ratio.abs()

    @cached_property
    def excess(self) -> Float[Tensor, " T"]:
        """The ratio r less 1, with its logarithm clamped."""
        return self.clamped.expm1()

    @cached_property
    def ratio(self) -> Float[Tensor, " T"]:
        return self.known(self.excess + 1)

    @cached_property
    def k3(self) -> Float[Tensor, " T"]:
        return k3(self.log_ratio)

    @cached_property
    def weighted_log_ratio(self) -> Float[Tensor, " T"]:
        return self.ratio * self.log_ratio

    @cached_property
    def proximal(self) -> Float[Tensor, " T"]:
        return self.known(self.correction.stage.log_probs.proximal.double())

    @cached_property
    def behavior(self) -> Float[Tensor, " T"]:
        return self.known(self.correction.stage.log_probs.behavior.double())

    @cached_property
    def proximal_prob(self) -> Float[Tensor, " T"]:
        return self.known(self.proximal.exp())

    @cached_property
    def behavior_prob(self) -> Float[Tensor, " T"]:
        return self.known(self.behavior.exp())

    @cached_property
    def abs_prob_diff(self) -> Float[Tensor, " T"]:
        return (self.proximal_prob - self.behavior_prob).abs()

    @cached_property
    def normalized(self) -> Float[Tensor, " T"]:
        return self.known(self.correction.weights.double())

    @cached_property
    def weight(self) -> Float[Tensor, " T"]:
        """The weight after its bound and before normalization."""
        mean = self.correction.mean_weight
        return self.normalized if mean is None else self.normalized * mean

    @cached_property
    def kept_weight(self) -> Float[Tensor, " T"]:
        """The weight as multiplied into the loss, 0 where the token is dropped."""
        return self.kept(self.normalized, 0)

    def lifted(self, upper: float) -> Float[Tensor, " T"]:
        """The kept weight within [1 / upper, upper], dropped tokens at the lower end."""
        return torch.where(self.correction.ragged.loss_mask, self.kept_weight.clamp(1 / upper, upper), 0)

    def known(self, x: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        return x.masked_fill(self._unusable, 0)

    def kept(self, x: Float[Tensor, " T"], otherwise: float) -> Float[Tensor, " T"]:
        return x.masked_fill(self._dropped, otherwise)

    # torch.where makes a tensor of a number each time, an operator more than masked_fill.

    @cached_property
    def _unusable(self) -> Bool[Tensor, " T"]:
        return ~self.usable

    @cached_property
    def _dropped(self) -> Bool[Tensor, " T"]:
        return ~self.correction.keep


@dataclass(frozen=True)
class Sequences:
    """The whole sequences of one micro-batch. A mean is over the usable tokens of a sequence, 0 where it has none."""

    correction: Correction

    @property
    def config(self) -> CorrectionConfig:
        return self.correction.config

    @property
    def totals(self) -> Totals:
        return self.correction.totals

    @property
    def any_usable(self) -> Bool[Tensor, " N"]:
        """Sequences with a usable token."""
        return self.totals.any_usable

    @property
    def log_ratio(self) -> Float[Tensor, " N"]:
        """Sum of the log ratios of each sequence's usable tokens."""
        return self.totals["log_ratio"]

    @cached_property
    def abs_log_ratio(self) -> Float[Tensor, " N"]:
        return self.log_ratio.abs()

    @cached_property
    def mean_log_ratio(self) -> Float[Tensor, " N"]:
        return self.mean("log_ratio")

    @property
    def log_ppl(self) -> LogPerplexity:
        return self.correction.log_ppl

    @property
    def units(self) -> Totals:
        """Totals that the weight of a sequence reads: of all valid tokens, or of those that smaller units keep."""
        return self.correction.verdict.unit_totals

    @cached_property
    def kept(self) -> Float[Tensor, " N"]:
        """Number of usable tokens of each sequence that are kept."""
        after_opsm = self.correction.after_opsm
        return self.correction.verdict.kept_usable if after_opsm is None else after_opsm.usable

    @cached_property
    def weight(self) -> Float[Tensor, " N"]:
        """Mean of the bounded weights over a sequence's valid tokens, 0 where unknown, before normalization."""
        mean = self._over_valid(self.totals["weight" if weighs_tokens(self.config) else "usable"])
        weight = self.correction.sequence_weight
        return mean if weight is None else mean * weight

    @cached_property
    def ratio(self) -> Float[Tensor, " N"]:
        """Mean over a sequence's valid tokens of their ratios: the weights before the bound."""
        return self._over_valid(self.totals["weighed"])

    @cached_property
    def kept_weight(self) -> Float[Tensor, " N"]:
        """Mean over a sequence's valid tokens of the weights as multiplied into the loss, 0 where dropped."""
        c = self.correction
        if c.after_opsm is not None:
            return self._over_valid(c.after_opsm.weight)
        weighs = weighs_tokens(self.config)
        total = c.verdict.of_kept_sequences(self.totals["kept_weight"]) if weighs else self.kept
        total = total if c.sequence_weight is None else total * c.sequence_weight
        return self._over_valid(total if c.mean_weight is None else total / c.mean_weight)

    def mean(self, row: str) -> Float[Tensor, " N"]:
        """Mean of a row of the totals over the usable tokens of each sequence."""
        return self.totals[row] / self.correction.usable_count

    def _over_valid(self, total: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return total / self.totals.size


TokenRow = Callable[[Tokens], Shaped[Tensor, " T"]]
SequenceRow = Callable[[Sequences], Shaped[Tensor, " N"]]
Rows = Iterator[tuple[str, Shaped[Tensor, " *"]]]
"""Rows with their names. A row is computed when it is read."""


def numbered(config: CorrectionConfig) -> list[tuple[str, RejectRule]]:
    """The rules of a config with their names: `rule_1`, `rule_2` and so on."""
    return [(f"rule_{i}", rule) for i, rule in enumerate(config.reject, 1)]


# Rows over tokens.

TOKEN_SUMS: dict[str, TokenRow] = {
    "valid": lambda t: t.correction.ragged.loss_mask,
    "kept": lambda t: t.correction.keep,
    "log_ratio": lambda t: t.log_ratio,
    "abs_log_ratio": lambda t: t.abs_log_ratio,
    "k3": lambda t: t.k3,
    "ratio": lambda t: t.ratio,
    "reverse_k1": lambda t: t.weighted_log_ratio,
    "reverse_k2": lambda t: t.weighted_log_ratio * t.log_ratio / 2,
    "reverse_k3": lambda t: t.weighted_log_ratio - t.excess,
    "proximal": lambda t: t.proximal,
    "behavior": lambda t: t.behavior,
    "log_prob_product": lambda t: t.proximal * t.behavior,
    "proximal_prob": lambda t: t.proximal_prob,
    "behavior_prob": lambda t: t.behavior_prob,
    "prob_product": lambda t: t.proximal_prob * t.behavior_prob,
    "abs_prob_diff": lambda t: t.abs_prob_diff,
    "saturated": lambda t: t.abs_log_ratio > LOG_RATIO_CLAMP,
    "weight": lambda t: t.weight,
    "normalized": lambda t: t.normalized,
    "kept_weight": lambda t: t.kept_weight,
    "kept_log_ratio": lambda t: t.kept(t.log_ratio, 0),
}

SQUARED = (
    "log_ratio", "ratio", "proximal", "behavior", "proximal_prob", "behavior_prob", "abs_prob_diff", "weight",
    "kept_weight",
)  # fmt: skip
"""Rows over tokens whose squares are added up too, under their name and `_squared`."""

ADVANTAGE_SUMS: dict[str, Callable[[Tokens, Tensor], Shaped[Tensor, " T"]]] = {
    "with_advantage": lambda t, _: t.correction.ragged.loss_mask,
    "nonfinite_advantages": lambda t, lost: lost,
}

LOSS_SUMS: dict[str, Callable[[Tokens, Tensor], Shaped[Tensor, " T"]]] = {
    "with_loss": lambda t, _: t.correction.ragged.loss_mask,
    "loss": lambda t, loss: torch.where(t.correction.ragged.loss_mask, loss, 0),
    "corrected_loss": lambda t, loss: t.kept(loss * t.correction.weights if t.config.corrects else loss, 0),
}


def token_sums(t: Tokens) -> Rows:
    """Rows that are added over all tokens, and read 0 where a token shall not enter."""
    yield from ((name, row(t)) for name, row in TOKEN_SUMS.items())
    for bound in LOG_RATIO_TAILS:
        yield f"above_{bound}", t.log_ratio > bound
        yield f"below_{bound}", t.log_ratio < -bound
    for bound in PROB_DIFF_TAILS:
        yield f"prob_diff_above_{bound}", t.abs_prob_diff > bound
    upper = lifting_bound(t.config)
    if upper is not None:
        lifted = t.lifted(upper)
        yield "lifted", lifted
        yield "lifted_squared", lifted.square()
    for name, row in LOSS_SUMS.items():
        yield name, torch.zeros_like(t.log_ratio) if t.pg_loss is None else row(t, t.pg_loss.double())
    if t.correction.on_policy is not None:
        yield "opsm_masked", t.correction.ragged.loss_mask & ~t.correction.on_policy
    lost = t.correction.nonfinite_advantages
    for name, row in ADVANTAGE_SUMS.items():
        yield name, torch.zeros_like(t.log_ratio) if lost is None else row(t, lost)


def usable_token_sums(t: Tokens) -> Rows:
    """Rows that are added over usable tokens alone: elsewhere they need not read 0."""
    yield "usable", t.usable
    weight, unit = t.config.weight, t.correction.stage.unit_log_ratio
    if weight is not None and unit is not None:
        low, high = weight_limits(weight)
        yield "weight_low", unit < low
        yield "weight_high", unit > high
        yield "outside_bound", _outside(unit, weight)
    for name, rule in numbered(t.config):
        if rule.over == "token":
            value = t.correction.stage.statistic(rule.statistic)
            yield f"{name}_count", t.usable
            yield from _outside_and_moments(name, rule, value)
            yield from _within_bounds(name, rule, value)


def token_squares(t: Tokens, names: Iterable[str] = SQUARED) -> Rows:
    """Rows whose squares are added over all tokens."""
    return ((f"{name}_squared", getattr(t, name)) for name in names)


def token_maxima(t: Tokens) -> Rows:
    """Rows whose largest value over usable tokens is taken; a row for the smallest value is negated."""
    yield "abs_prob_diff_max", t.abs_prob_diff
    yield "weight_of_kept_min", t.kept(-t.normalized, -math.inf)
    yield "kept_log_ratio_max", t.kept(t.log_ratio, -math.inf)
    yield "kept_log_ratio_min", t.kept(-t.log_ratio, -math.inf)


def token_extremes(t: Tokens) -> Rows:
    """Rows whose largest and smallest value over usable tokens are taken."""
    yield from (("log_ratio", t.log_ratio), ("weight", t.weight), ("kept_weight", t.kept_weight))
    for name, rule in numbered(t.config):
        if rule.over == "token":
            yield name, t.correction.stage.statistic(rule.statistic)


# Rows over sequences.

SEQUENCE_SUMS: dict[str, SequenceRow] = {
    "any_usable": lambda s: s.any_usable,
    "log_ppl_diff": lambda s: s.log_ppl.excess,
    "log_ppl_abs_diff": lambda s: s.log_ppl.excess.abs(),
    "ppl_ratio": lambda s: exp_finite(s.log_ppl.excess),
    "train_log_ppl": lambda s: s.log_ppl.training,
    "train_ppl": lambda s: exp_finite(s.log_ppl.training),
    "rollout_log_ppl": lambda s: s.log_ppl.rollout,
    "rollout_ppl": lambda s: exp_finite(s.log_ppl.rollout),
    "geometric_squared": lambda s: exp_clamped(s.mean_log_ratio).square(),
    "sequence_log_ratio": lambda s: s.log_ratio,
    "abs_sequence_log_ratio": lambda s: s.abs_log_ratio,
    "product_squared": lambda s: exp_clamped(s.log_ratio).square(),
    "saturated_sequences": lambda s: s.abs_log_ratio > LOG_RATIO_CLAMP,
    "sequence_weight": lambda s: s.weight,
    "sequence_weight_squared": lambda s: s.weight.square(),
    "sequence_kept_weight": lambda s: s.kept_weight,
}

SEQUENCE_COUNTS: dict[str, SequenceRow] = {
    "any_valid": lambda s: s.correction.any_valid,
    "kept_sequences": lambda s: s.kept > 0,
    "touched_sequences": lambda s: s.kept < s.totals["valid"],
}


def sequence_sums(s: Sequences) -> Rows:
    """Rows that are added over sequences with a usable token. `unit_rule_sums` has the rows of rules over units."""
    yield from ((name, row(s)) for name, row in SEQUENCE_SUMS.items())
    yield from _sequence_weight_sums(s)
    for name, rule in numbered(s.config):
        if rule.over == "token":
            yield f"{name}_unit_count", s.any_usable
            yield from _outside_and_moments(f"{name}_unit", rule, s.mean(row_of(rule.statistic)))
            yield f"{name}_unit_touched", _loses_a_token(s.totals, rule)


def sequence_counts(s: Sequences) -> Rows:
    """Rows that are added over sequences with a valid token."""
    yield from ((name, row(s)) for name, row in SEQUENCE_COUNTS.items())


def _sequence_weight_sums(s: Sequences) -> Rows:
    weight = s.config.weight
    if weight is None:
        return
    low, high = weight_limits(weight)
    if not weight.by_sequence:
        yield "sequence_ratio_low", s.ratio < math.exp(low)
        yield "sequence_ratio_high", s.ratio > math.exp(high)
        return
    unit = known_log_ratio(s.units, weight)
    for name in ("sequence_ratio", "weight"):
        yield f"{name}_low", unit < low
        yield f"{name}_high", unit > high
    yield "outside_bound", torch.where(_outside(unit, weight), s.totals["usable"], 0)


def sequence_extremes(s: Sequences) -> Rows:
    """Rows whose largest and smallest value over sequences with a usable token are taken."""
    yield "mean_log_ratio", s.mean_log_ratio
    yield "sequence_log_ratio", s.log_ratio
    yield "sequence_weight", s.weight
    yield "sequence_kept_weight", s.kept_weight
    for name, rule in numbered(s.config):
        if rule.over == "token":
            yield f"{name}_unit", s.mean(row_of(rule.statistic))


# Rows of OPSM, over sequences with a valid token.

DEPARTURES: dict[str, Callable[[Departure], Float[Tensor, " N"]]] = {
    "opsm_divergence": lambda d: d.divergence,
    "opsm_divergence_negative": lambda d: torch.where(d.advantage < 0, d.divergence, torch.inf),
    "opsm_divergence_positive": lambda d: torch.where(d.advantage > 0, d.divergence, torch.inf),
    "opsm_mismatch": lambda d: d.mismatch,
    "opsm_staleness": lambda d: d.staleness,
}
"""Numbers of a sequence that OPSM's metrics are made of; infinite where the number does not exist or is unknown."""


def departures(d: Departure) -> Float[Tensor, "D N"]:
    """Rows of `DEPARTURES`, stacked."""
    return torch.stack([row(d) for row in DEPARTURES.values()])


def departure_sums(d: Departure) -> Rows:
    """Rows that are added over sequences with a valid token."""
    for name, value in zip(DEPARTURES, departures(d), strict=True):
        known = value.isfinite()
        yield f"{name}_count", known
        yield name, torch.where(known, value, 0)
    yield "opsm_unknown", d.divergence.isinf()


# Rows of rules over units (sequences or segments), over units with a usable token.


def unit_rules(config: CorrectionConfig, unit: Unit, population: Population) -> list[tuple[str, RejectRule]]:
    """The numbered rules that drop this kind of unit and read this population of tokens."""
    asked = unit, population
    rules = [(name, rule) for name, rule in numbered(config) if rule.over != "token"]
    return [(name, rule) for name, rule in rules if (rule.unit, config.population(rule)) == asked]


def unit_rule_sums(rules: list[tuple[str, RejectRule]], units: Totals) -> Rows:
    """Rows that are added over units, and once more by valid tokens under their name without `_unit`."""
    for name, rule in rules:
        value = aggregate(units, rule)
        yield f"{name}_unit_count", units["usable"] > 0
        yield from _outside_and_moments(f"{name}_unit", rule, value)
        yield from _within_bounds(f"{name}_unit", rule, value)
        yield f"{name}_unit_touched", ~passes(value, rule, units.known)


def unit_rule_extremes(rules: list[tuple[str, RejectRule]], units: Totals) -> Rows:
    """Rows whose largest and smallest value over units are taken."""
    return ((f"{name}_unit", aggregate(units, rule)) for name, rule in rules)


# Rows that warnings need, whatever `mis.metrics` says.


def multiplies(config: CorrectionConfig) -> tuple[Unit, Population] | None:
    """The unit and population of tokens over which a weight or rule multiplies ratios: the longest such product.

    The answer is None where the config multiplies no ratios.
    """
    rules = [rule for rule in config.reject if rule.multiplies]
    products: list[tuple[Unit, Population]] = [(rule.unit, config.population(rule)) for rule in rules]
    weight = config.weight
    if weight and (weight.level == "sequence" or weight.level == "segment"):
        products.append((weight.level, config.weight_population))
    return min(products, key=lambda product: (product[0] != "sequence", product[1] != "valid"), default=None)


def product_sums(log_ratio: Float[Tensor, " N"]) -> Rows:
    """Rows that tell how far products of ratios go, added over units with a usable token."""
    size = log_ratio.abs()
    yield "product_count", torch.ones_like(size)
    yield "product_size", size
    yield "product_saturated", size > LOG_RATIO_CLAMP


def lifting_bound(config: CorrectionConfig) -> float | None:
    """Upper bound of the weight; of an unbounded weight, the upper bound of the first rule on ratios that has one."""
    if config.weight is None:
        return None
    if math.isfinite(config.weight.ceiling):
        return config.weight.ceiling
    on_ratio = (rule for rule in config.reject if row_of(rule.statistic) == "log_ratio")
    return next((rule.upper for rule in on_ratio if rule.upper), None)


def weight_limits(weight: WeightConfig) -> tuple[float, float]:
    """Logarithms of the limits of a weight. Without a lower bound, 1 / upper stands in, to report both sides."""
    high = log_bound(weight.ceiling)
    return (log_bound(weight.floor) if weight.floor else -high), high


def _outside(log_ratio: Tensor, weight: WeightConfig) -> Bool[Tensor, " *"]:
    """Tokens or units whose ratio lies outside the weight's bound."""
    return (log_ratio < log_bound(weight.floor)) | (log_ratio > log_bound(weight.ceiling))


# Rows of each rule alone.


def _outside_and_moments(name: str, rule: RejectRule, value: Tensor) -> Rows:
    """Rows of a rule's statistic, of its square, and of where it lies below or above the rule's bounds."""
    lower, upper = rule.limits
    yield name, value
    yield f"{name}_squared", value.double().square()
    if lower is not None:
        yield f"{name}_low", value < lower
    if upper is not None:
        yield f"{name}_high", value > upper


def _within_bounds(name: str, rule: RejectRule, value: Tensor) -> Rows:
    """Rows of a rule's statistic clamped to the rule's bounds, and to 0 where the rule has no lower bound."""
    lower, upper = rule.limits
    bounded = value.double().clamp(0 if lower is None else lower, upper)
    yield f"{name}_bounded", bounded
    yield f"{name}_bounded_squared", bounded.square()


def _loses_a_token(totals: Totals, rule: RejectRule) -> Bool[Tensor, " N"]:
    """Sequences that lose a token to a rule over tokens."""
    row, (lower, upper) = row_of(rule.statistic), rule.limits
    lost = ~totals.known
    if lower is not None:
        lost = lost | (totals[row + "_min"] < lower)
    return lost if upper is None else lost | (totals[row + "_max"] > upper)
