"""The quantities of tokens: what is measured of each token of a step, in float64, local to a rank."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, RejectRule, WeightConfig
from mis_plugins.config.terms.statistics import row_of
from mis_plugins.correction.pipeline import Correction
from mis_plugins.correction.ratios import LOG_RATIO_CLAMP, log_bound
from mis_plugins.correction.token_stage import TokenStage
from mis_plugins.metrics import quantity as take
from mis_plugins.metrics.quantity import Metrics, Quantity, Reduction, Step
from mis_plugins.metrics.totals import Places

TURNS = 4  # turns 1, 2 and 3, and 4 with all later ones
AGES = 8  # ages 0, 1, ... 6, and 7 with all older tokens
OF_TURNS = tuple(f"turn_{turn}/" for turn in range(1, TURNS + 1))
OF_AGES = tuple(f"lag_{age}/" for age in range(AGES))
KEPT = "kept/"
PLACES = ("", KEPT, *OF_TURNS, *OF_AGES)
"""Parts of the usable tokens: all, kept, by turn of a dialogue (a run of ones in the loss mask), and by age."""
LOG_RATIO_TAILS = (0.1, 1.0)
PROB_DIFF_TAILS = (0.05, 0.2, 0.5)
# A CPU is handed this many tokens at a time: longer stacks of rows leave its cache.
LONG_ON_CPU = 32_768


@dataclass(frozen=True)
class Tokens:
    """The local tokens of one micro-batch, or a part of them.

    keep: tokens that are left by every rule, unusable ones included.
    pg_loss: the loss before correction, without gradient; None where the host did not hand it over.
    ages: the age of each token, negative where it is not known; None where the host knows no versions.
    turns: the turn of each token, from 1; None where no number by turn is asked for.
    """

    config: CorrectionConfig
    stage: TokenStage
    weights: Float[Tensor, " T"]
    keep: Bool[Tensor, " T"]
    mean_weight: Float[Tensor, ""] | None
    on_policy: Bool[Tensor, " T"] | None
    nonfinite_advantages: Bool[Tensor, " T"] | None
    pg_loss: Float[Tensor, " T"] | None
    ages: Int[Tensor, " T"] | None
    turns: Int[Tensor, " T"] | None

    @classmethod
    def of(
        cls,
        c: Correction,
        pg_loss: Float[Tensor, " T"] | None = None,
        ages: Int[Tensor, " T"] | None = None,
        turns: Int[Tensor, " T"] | None = None,
    ) -> "Tokens":
        masks = c.on_policy, c.nonfinite_advantages
        return cls(c.config, c.stage, c.weights, c.keep, c.mean_weight, *masks, pg_loss, ages, turns)

    def parts(self) -> "Iterator[Tokens]":
        """The tokens in one part, or in several that fit a CPU's cache."""
        count = self.keep.numel()
        if not self.keep.is_cpu or count <= LONG_ON_CPU:
            yield self
            return
        for start in range(0, count, LONG_ON_CPU):
            yield _cut(self, slice(start, start + LONG_ON_CPU))

    @property
    def usable(self) -> Bool[Tensor, " T"]:
        return self.stage.usable

    @cached_property
    def where(self) -> Float[Tensor, " T"]:
        """1 at usable tokens, else 0."""
        return self.usable.double()

    @cached_property
    def kept(self) -> Float[Tensor, " T"]:
        """1 at usable tokens that are kept, else 0."""
        return self.where * self.keep

    @cached_property
    def log_ratio(self) -> Float[Tensor, " T"]:
        """log pi_old - log mu; 0 where the token is not usable."""
        return self.stage.log_ratio.double()

    @cached_property
    def excess(self) -> Float[Tensor, " T"]:
        """The ratio r less 1, with its logarithm clamped."""
        return self.log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1_()

    @cached_property
    def log_probs(self) -> Float[Tensor, "2 T"]:
        """log pi_old and log mu; 0 where the token is not usable."""
        pair = torch.stack([self.stage.proximal_log_probs, self.stage.behavior_log_probs]).double()
        return pair.masked_fill_(self.stage.unusable, 0)

    @cached_property
    def normalized(self) -> Float[Tensor, " T"]:
        """The weight that multiplies the loss; 0 where the token is not usable."""
        return self.weights.double()

    def places(self) -> Places:
        """The usable tokens: all, kept, of each turn, and where versions are known of each age."""
        assert self.turns is not None
        turns = self.turns * self.usable  # 0 where the token is not usable
        rows = [self.where, self.kept, *(turns == turn for turn in range(1, TURNS)), turns >= TURNS]
        if self.ages is not None:
            ages = self.ages.masked_fill(self.stage.unusable, -1)
            rows += [*(ages == age for age in range(AGES - 1)), ages >= AGES - 1]
        return Places(PLACES, torch.stack(rows).T)


def _cut(record: Any, part: slice) -> Any:
    """The record with all tensors, also of records in it, cut to a part of the tokens."""
    held = {f.name: getattr(record, f.name) for f in fields(record)}
    tensors = {name: x[part] for name, x in held.items() if isinstance(x, Tensor) and x.dim()}
    records = {name: _cut(x, part) for name, x in held.items() if isinstance(x, TokenStage)}
    return replace(record, **tensors, **records)


def _by_place(metrics: Metrics, places: tuple[str, ...] = OF_TURNS + OF_AGES) -> Metrics:
    """Metrics over the tokens of each turn and of each age, alone."""
    return {f"{at[:-1]}_{name}": reduction.within(at) for at in places for name, reduction in metrics.items()}


def _share_of_place(s: Step, x: str, _: str) -> float:
    places = OF_TURNS if x.startswith("turn") else OF_AGES
    return take.ratio_of(s.sums[x], sum(s.sums[f"{place}usable"] for place in places))


OF_USABLE = _by_place({"share": Reduction("sum", _share_of_place)})
OF_LOG_RATIO = {
    "kl_k1": take.minus_mean,
    "kl_k2": take.mean_square.then(lambda x: x / 2),
    "log_prob_diff_abs_max": take.size,
    "ratio_min": take.smallest.then(take.exp_clamped),
    "ratio_max": take.largest.then(take.exp_clamped),
    "kept_log_ratio_mean": take.mean.within(KEPT),
    **_by_place({"kl_k1": take.minus_mean}),
    **take.percentiles("ratio", take.exp_of),
}
OF_ABS_LOG_RATIO = {"log_prob_diff_abs_mean": take.mean} | _by_place({"log_prob_diff_abs_mean": take.mean}, OF_TURNS)
OF_K3 = {"kl_k3": take.mean} | _by_place({"kl_k3": take.mean})
OF_RATIO = {"ratio_mean": take.mean, "chi2_token": take.chi2, "ess_ratio": take.share} | _by_place(
    {"ratio_mean": take.mean}
)
OF_KEPT = _by_place({"kept_fraction": take.mean})
OF_PROB_DIFF = {
    "prob_diff_abs_mean": take.mean,
    "prob_diff_abs_std": take.unbiased_std,
    "prob_diff_abs_max": take.largest,
}
OF_WEIGHT = {"weight_mean": take.mean, "weight_std": take.std, "weight_min": take.smallest, "weight_max": take.largest}
OF_NORMALIZED = {
    "applied_mean": take.mean.within(KEPT),
    "applied_valid_mean": take.mean.over("valid").within(KEPT),
    "ess": take.share.over("valid").within(KEPT),
}
OF_LOG_WEIGHT = take.percentiles("weight", take.exp_of)


def related(t: Tokens) -> Iterator[Quantity]:
    """What `metrics/slope.py` relates."""
    proximal, behavior = t.log_probs.unbind()
    yield Quantity("proximal", proximal, also="sum squares")
    yield Quantity("behavior", behavior, also="sum squares")
    yield Quantity("log_prob_product", proximal * behavior, also="sum")
    yield Quantity("ratio", t.excess + 1, OF_RATIO)


def of_usable(t: Tokens) -> Iterator[Quantity]:
    """Quantities of usable tokens."""
    x, far = t.log_ratio, t.log_ratio.abs()
    yield Quantity("usable", t.where, OF_USABLE)
    yield Quantity("log_ratio", x, OF_LOG_RATIO)
    yield Quantity("abs_log_ratio", far, OF_ABS_LOG_RATIO)
    yield Quantity("k3", t.excess - x.clamp(max=LOG_RATIO_CLAMP), OF_K3)
    *both, ratio = related(t)
    yield from (*both, ratio)
    weighted = ratio.values * x
    yield Quantity("reverse_k1", weighted, {"reverse_kl_k1": take.mean})
    yield Quantity("reverse_k2", weighted * x, {"reverse_kl_k2": take.half_mean})
    yield Quantity("reverse_k3", weighted - t.excess, {"reverse_kl_k3": take.mean})
    yield Quantity("saturated", far > LOG_RATIO_CLAMP, {"saturated_tokens": take.mean})
    yield Quantity("kept_usable", t.kept, OF_KEPT)
    for bound in LOG_RATIO_TAILS:
        yield from beyond("log_ratio_tail_{side}_" + str(bound), x, (-bound, bound))
    yield from _probabilities(t)
    weight = t.normalized if t.mean_weight is None else t.normalized * t.mean_weight
    yield Quantity("weight", weight, OF_WEIGHT | {"ess_bounded": take.share}, over="valid")
    yield Quantity("log_weight", weight.log(), OF_LOG_WEIGHT)
    yield Quantity("normalized", t.normalized, OF_NORMALIZED)
    upper = _lifting_bound(t.config)
    if upper is not None:
        lifted = Reduction("sum squares", lambda s, x, _: _lifted_share(s, x, upper), KEPT)
        yield Quantity("lifted", t.normalized.clamp(1 / upper, upper), {"ess_lifted": lifted})
    if t.config.weight is not None and not t.config.weight.by_sequence:
        unit = t.stage.unit_log_ratio
        assert unit is not None
        low, high = beyond("weight_{side}_fraction", unit, weight_limits(t.config.weight))
        # Without a floor the lower limit is a stand-in, below which no weight is bounded.
        acts = [low.name, high.name] if t.config.weight.floor else [high.name]
        outside = Reduction("sum", lambda s, _, n: sum(s.over(x, n) for x in acts))
        yield from (low, high._replace(metrics=high.metrics | {"outside_bound_fraction": outside}))
    for name, rule in rules(t.config):
        if rule.over == "token":
            yield from _of_rule(name, rule, t.stage.statistic(rule.statistic).double())


def _probabilities(t: Tokens) -> Iterator[Quantity]:
    proximal, behavior = t.log_probs.exp().unbind()
    difference = (proximal - behavior).abs_()
    yield Quantity("proximal_prob", proximal, also="sum squares")
    yield Quantity("behavior_prob", behavior, also="sum squares")
    yield Quantity("prob_product", proximal * behavior, also="sum")
    yield Quantity("abs_prob_diff", difference, OF_PROB_DIFF)
    for bound in PROB_DIFF_TAILS:
        yield Quantity(f"prob_diff_tail_{bound}", difference > bound, {f"prob_diff_tail_{bound}": take.mean})


def of_valid(t: Tokens) -> Iterator[Quantity]:
    """Quantities of valid tokens."""
    valid, lost = t.stage.loss_mask, t.nonfinite_advantages
    nothing = torch.zeros_like(valid)
    yield Quantity("valid", valid, {"tokens": take.total})
    yield Quantity("kept", t.keep, {"kept_fraction": take.mean, "rejected_fraction": take.rest}, over="valid")
    yield Quantity("with_advantage", nothing if lost is None else valid, also="sum")
    yield Quantity("nonfinite_advantages", nothing if lost is None else lost, also="sum")
    if t.pg_loss is None:
        loss = corrected = nothing.double()
    else:
        loss = t.pg_loss.double().masked_fill(~valid, 0)
        corrected = (loss * t.weights if t.config.corrects else loss).masked_fill(~t.keep, 0)
    yield Quantity("with_loss", nothing if t.pg_loss is None else valid, also="sum")
    yield Quantity("loss", loss, {"loss_uncorrected": take.mean}, over="with_loss")
    yield Quantity("corrected_loss", corrected, {"loss_original_denominator": take.mean}, over="with_loss")
    if t.on_policy is not None:
        yield Quantity("opsm_masked", valid & ~t.on_policy, {"opsm_masked_fraction": take.mean}, over="valid")


def of_kept(t: Tokens) -> Iterator[Quantity]:
    """Extremes of usable tokens that are kept; their sums are those of usable tokens at the place `KEPT`."""
    yield Quantity("kept_weight", t.normalized, OF_KEPT_WEIGHT)
    yield Quantity("kept_log_ratio", t.log_ratio, OF_KEPT_LOG_RATIO)


def _applied_min(s: Step, x: str, _: str) -> float:
    return s.smallest(x) if s.sums["kept_usable"] == s.sums["usable"] else 0.0


def _applied_max(s: Step, x: str, _: str) -> float:
    none_is_kept = 0.0 if s.sums["usable"] else math.nan
    return s.largest(x) if s.sums["kept_usable"] else none_is_kept


# A dropped token weighs 0 in metrics of applied weights, and 1 / upper in metrics of lifted weights.
OF_KEPT_WEIGHT = {
    "kept_weight_min": take.smallest,
    "applied_min": Reduction("ends", _applied_min),
    "applied_max": Reduction("ends", _applied_max),
}
OF_KEPT_LOG_RATIO = {"kept_log_ratio_min": take.smallest, "kept_log_ratio_max": take.largest}


def _lifted_share(s: Step, name: str, upper: float) -> float:
    """Effective sample size of weights within [1 / upper, upper], as a share of the valid tokens."""
    valid = s.sums["valid"]
    others = valid - s.sums["kept_usable"]
    lifted, squares = s.sums[name] + others / upper, s.sums[f"{name}_squared"] + others / upper**2
    return take.ratio_of(lifted**2, valid * squares)


def _lifting_bound(config: CorrectionConfig) -> float | None:
    """Upper bound of the weight; of an unbounded weight, the upper bound of the first rule on ratios that has one."""
    if config.weight is None:
        return None
    if math.isfinite(config.weight.ceiling):
        return config.weight.ceiling
    on_ratio = (rule for rule in config.reject if row_of(rule.statistic) == "log_ratio")
    return next((rule.upper for rule in on_ratio if rule.upper), None)


# Numbers beside the bounds of weights and rules, of tokens and of larger units.

Limits = tuple[float | None, float | None]


def rules(config: CorrectionConfig) -> list[tuple[str, RejectRule]]:
    """The rules of a config with their names: `rule_1`, `rule_2` and so on."""
    return [(f"rule_{i}", rule) for i, rule in enumerate(config.reject, 1)]


def weight_limits(weight: WeightConfig) -> tuple[float, float]:
    """Logarithms of the limits of a weight. Without a lower bound, 1 / upper stands in, to report both sides."""
    high = log_bound(weight.ceiling)
    return (log_bound(weight.floor) if weight.floor else -high), high


def beyond(name: str, values: Tensor, limits: Limits, over: str = "usable", by_tokens: str = "") -> Iterator[Quantity]:
    """Where a number lies below, and where above its limits, if it has any.

    Args:
        name: the metric's name, with {side} for `low` and `high`.
        by_tokens: the name of the metric of the tokens of units.
    """
    low, high = ((-math.inf if limits[0] is None else limits[0]), (math.inf if limits[1] is None else limits[1]))
    for side, marks in (("low", values < low), ("high", values > high)):
        metrics = {name.format(side=side): take.mean}
        if by_tokens:
            metrics[by_tokens.format(side=side)] = take.mean_by_tokens
        yield Quantity(name.format(side=side), marks, metrics, over=over)


def bounded(values: Tensor, rule: RejectRule) -> Float[Tensor, " *"]:
    """What a rule compares, clamped to the rule's bounds, and to 0 where the rule has no lower bound."""
    lower, upper = rule.limits
    return values.double().clamp(0 if lower is None else lower, upper)


def _of_rule(name: str, rule: RejectRule, values: Tensor) -> Iterator[Quantity]:
    yield Quantity(name, values, {f"{name}_mean": take.mean, f"{name}_min": take.smallest, f"{name}_max": take.largest})
    yield Quantity(f"{name}_bounded", bounded(values, rule), {f"{name}_std": take.std})
    yield from beyond(name + "_{side}_fraction", values, rule.limits)
