"""What is added up over each sequence: everything of a micro-batch that crosses context-parallel ranks, in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, RejectRule
from mis_plugins.correction.ratios import LogProbs, bits, exp_clamped, log_ratio, nonfinite, only, only_
from mis_plugins.correction.rejection import Totals, passes, total_of
from mis_plugins.correction.weights import bounded_weight, in_bounds
from mis_plugins.packing.ragged import Ragged
from mis_plugins.terms.statistics import STATISTICS, row_of


@dataclass(frozen=True)
class TokenStage:
    """What is known of each local token before its sequence is known.

    log_ratio: log pi_old - log mu; 0 where the token is not usable.
    usable: tokens in loss_mask of which both log-probs are finite.
    usable_bits: `usable` as `bits` makes it.
    ratio: exp(log_ratio), clamped; 0 where the token is not usable.
    unit_log_ratio: log ratio of what weighs the token: its own, 0 where it is not usable, or its segment's, NaN where
        that is not known and any at a masked token; None at the other levels. With segment-wise weights log pi_{v+1} -
        log mu, and a token of which that is not known is not usable either.
    weight: bounded, of the token or of its segment; None at the other levels.
    passing: the weight is known, and within a bound that gives no weight outside.
    keep: what mask bound and rules over tokens and segments leave; None where they can drop nothing.
    """

    config: CorrectionConfig
    log_probs: LogProbs
    loss_mask: Bool[Tensor, " T"]
    log_ratio: Float[Tensor, " T"]
    usable: Bool[Tensor, " T"]
    usable_bits: Int[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    unit_log_ratio: Float[Tensor, " T"] | None
    weight: Float[Tensor, " T"] | None
    passing: Bool[Tensor, " T"]
    keep: Bool[Tensor, " T"] | None

    @property
    def weighed(self) -> Float[Tensor, " T"]:
        """What the weight bounds: the token's ratio, the segment-wise one, or its segment's; 0 where not known."""
        by_segment = self.config.weight is not None and self.config.weight.by_segment
        if not (self.config.segment_wise_on or by_segment):
            return self.ratio
        assert self.unit_log_ratio is not None
        return only_(exp_clamped(self.unit_log_ratio).nan_to_num_(0.0), self.usable_bits)

    @property
    def applied(self) -> Float[Tensor, " T"]:
        """Weight of the token where it is kept, else 0."""
        assert self.weight is not None
        return self.weight if self.keep is None else torch.where(self.keep, self.weight, 0)

    def statistic(self, name: str) -> Float[Tensor, " T"]:
        """Values that a rule compares; 0 at tokens that are not usable."""
        record = STATISTICS[name]
        value = record.value(self.log_ratio, self.log_probs.proximal, self.log_probs.behavior)
        return only(value, self.usable_bits) if record.reads_probabilities else value


def token_stage(
    proximal: Float[Tensor, " T"],
    behavior: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    config: CorrectionConfig,
    numerator: Float[Tensor, " T"] | None = None,
) -> TokenStage:
    """Ratio, weight and rules of each token as far as no other token is needed.

    Args:
        numerator: log-probs of pi_{v+1}, which segment-wise weights, and nothing else, compare with mu.
    """
    log_r, usable, usable_bits = log_ratio(proximal, behavior, loss_mask)
    weighed = log_r
    if numerator is not None:
        weighed, usable, usable_bits = log_ratio(numerator, behavior, usable)
        log_r = only_(log_r, usable_bits)
    ratio = only_(exp_clamped(log_r), usable_bits)
    weight = config.weight if config.weight and config.weight.level == "token" else None
    passing = in_bounds(weighed, usable, weight) if weight else usable
    bounds = ratio if numerator is None else only_(exp_clamped(weighed), usable_bits)
    stage = TokenStage(
        config=config,
        log_probs=LogProbs(proximal, behavior),
        loss_mask=loss_mask,
        log_ratio=log_r,
        usable=usable,
        usable_bits=usable_bits,
        ratio=ratio,
        unit_log_ratio=weighed if weight else None,
        weight=bounded_weight(bounds, usable, passing, weight) if weight else None,
        passing=passing,
        keep=None,
    )
    if not config.drops_below("sequence"):
        return stage
    keep = passing if weight and weight.record.drops_token else usable
    for rule in config.reject:
        if rule.over == "token":
            keep = passes(stage.statistic(rule.statistic), rule, keep)
    return replace(stage, keep=keep)


def narrowed(stage: TokenStage) -> TokenStage:
    """The stage with the kept tokens alone as its valid and usable tokens."""
    assert stage.keep is not None
    log_ratio = torch.where(stage.keep, stage.log_ratio, 0)
    return replace(
        stage, loss_mask=stage.keep, usable=stage.keep, usable_bits=bits(stage.keep), log_ratio=log_ratio
    )


Row = Callable[[TokenStage], Tensor | None]

SUMS: dict[str, Row] = {
    "valid": lambda stage: stage.loss_mask,
    "usable": lambda stage: stage.usable,
    "proximal": lambda stage: only(stage.log_probs.proximal.float(), stage.usable_bits),
    "weighed": lambda stage: stage.weighed,
    "weight": lambda stage: stage.weight,
    "passing": lambda stage: stage.passing,
    "passing_weight": lambda stage: (
        None if stage.weight is None else torch.where(stage.passing, stage.weight, 0)
    ),
    "kept": lambda stage: stage.keep,
    "applied": lambda stage: stage.applied,
}

SQUARED = "_squared"
SQUARES: dict[str, Row] = {"ratio_squared": lambda stage: stage.ratio} | {
    name + SQUARED: SUMS[name] for name in ("applied", "weight")
}

# What each total of what is kept reads where nothing is rejected.
UNREJECTED = {"applied": "weight", "applied_squared": "weight_squared", "kept": "usable"}

COUNTS: dict[str, Callable[[TokenStage], Tensor]] = {
    "nonfinite_train": lambda stage: _nonfinite(stage.log_probs.proximal, stage.loss_mask),
    "nonfinite_rollout": lambda stage: _nonfinite(stage.log_probs.behavior, stage.loss_mask),
}


def _nonfinite(x: Float[Tensor, " T"], loss_mask: Bool[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """In float32, where a ratio is made of it."""
    return loss_mask & nonfinite(x.float())


def _usable(stage: TokenStage) -> Tensor:
    return stage.usable


def _passing(stage: TokenStage) -> Tensor:
    return stage.passing


def _among(where: Callable[[TokenStage], Tensor], what: Row, none: float) -> Row:
    return lambda stage: torch.where(where(stage), what(stage), none)  # type: ignore[arg-type]


def _extremes(suffix: str, none: float) -> dict[str, Row]:
    return {
        f"passing{suffix}": _among(_passing, lambda stage: stage.log_ratio, none),
        f"weight{suffix}": _among(_usable, lambda stage: stage.weight, none),
        f"passing_weight{suffix}": _among(_passing, lambda stage: stage.weight, none),
    }


MINIMA: dict[str, Row] = _extremes("_min", torch.inf)
MAXIMA: dict[str, Row] = {"ratio_max": lambda stage: stage.ratio} | _extremes("_max", -torch.inf)


def _statistics() -> dict[str, Row]:
    """The statistic of each token, by the name of its total; read anew, so that a new record needs no line here."""
    return {row_of(name): lambda stage, name=name: stage.statistic(name) for name in STATISTICS}


def _statistic_extremes(suffix: str, none: float) -> dict[str, Row]:
    """The statistic of each usable token, for the smallest or the largest of a unit."""
    return {name + suffix: _among(_usable, row, none) for name, row in _statistics().items()}


def over_sequences(stage: TokenStage, ragged: Ragged, config: CorrectionConfig) -> Totals:
    """The totals that this config needs, by the names above; nothing is computed or sent where it needs none.

    Each has one value a sequence, those of `COUNTS` one for the micro-batch.
    """
    return totals_of(stage, ragged, needed(config))


def totals_of(stage: TokenStage, ragged: Ragged, names: Iterable[str]) -> Totals:
    """Totals of each unit of `ragged`: of each sequence, or of each segment."""
    names = set(names)
    summed = SUMS | _statistics()
    least = MINIMA | _statistic_extremes("_min", torch.inf)
    most = MAXIMA | _statistic_extremes("_max", -torch.inf)
    sums, squares, minima, maxima, counts = (
        [name for name in table if name in names] for table in (summed, SQUARES, least, most, COUNTS)
    )
    if not (sums or minima or maxima):
        return Totals()
    both = [name for name in sums if name + SQUARED in squares]
    sums = [name for name in sums if name not in both]
    squares = [name for name in squares if name.removesuffix(SQUARED) not in both]
    named = sums + squares + [name + suffix for name in both for suffix in ("", SQUARED)]
    rows, marked = ragged.over_sequence(
        (_row(summed[name], stage) for name in sums),
        (_row(SQUARES[name], stage) for name in squares),
        (_row(summed[name], stage) for name in both),
        (_row(least[name], stage) for name in minima),
        (_row(most[name], stage) for name in maxima),
        (COUNTS[name](stage) for name in counts),
    )
    by_unit = zip(named + minima + maxima, rows.unbind(), strict=True)
    return Totals((*by_unit, *zip(counts, marked.unbind(), strict=True)))


def _row(row: Row, stage: TokenStage) -> Tensor:
    value = row(stage)
    assert value is not None
    return value


@cache
def needed(config: CorrectionConfig) -> frozenset[str]:
    """Names of the tables above: none for token level without mean, rejection and metrics."""
    names = _needed_for_mean(config) | _needed_for_metrics(config)
    rules = sequence_rules(config)
    if rules or (config.weight and config.weight.by_sequence):
        names |= needed_for_units(rules)
    if config.can_end_empty:
        names |= {"valid", _kept_row(config)}
    if config.denominator == "kept":
        names |= {"valid", "kept" if config.drops_below("sequence") else "usable"}
    if config.on_all_rejected == "keep":
        names |= {UNREJECTED[name] for name in names & set(UNREJECTED)}
    return frozenset(names)


def needed_for_units(rules: Iterable[RejectRule]) -> set[str]:
    """What the ratio of a unit and these rules over it read."""
    return {"valid", "usable", "log_ratio"} | {total_of(rule) for rule in rules}


def weighs_tokens(config: CorrectionConfig) -> bool:
    """Whether each token has a weight of its own, or of its segment."""
    return config.weight is not None and not config.weight.by_sequence


def sequence_rules(config: CorrectionConfig) -> list[RejectRule]:
    return [rule for rule in config.reject if rule.over != "token" and rule.unit == "sequence"]


def segment_rules(config: CorrectionConfig) -> list[RejectRule]:
    return [rule for rule in config.reject if rule.unit == "segment"]


def monotone(config: CorrectionConfig) -> bool:
    """Whether the extreme weights of a sequence are those of its extreme token ratios."""
    weight = config.weight
    if weight is None or config.segment_wise_on:
        return False
    return weight.level == "token" and weight.record.monotone


def zero_weights(config: CorrectionConfig) -> bool:
    """Whether a sequence of usable tokens alone may have one that weighs 0: its bound says so, or its segment is not
    known, of which smaller units left nothing."""
    weight = config.weight
    return weight is not None and (not weight.record.weighs_outside or config.aggregate == "kept")


def _kept_row(config: CorrectionConfig) -> str:
    """What tells whether anything of a sequence is kept, sequence rules aside."""
    if weighs_tokens(config):
        return "applied"
    return "kept" if config.drops_below("sequence") else "usable"


def _needed_for_mean(config: CorrectionConfig) -> set[str]:
    weight = config.weight
    if weight is None or weight.normalize is None:
        return set()
    if weight.normalize.over == "kept":
        kept = {"kept" if config.drops_below("sequence") else "usable"}
        return kept | ({"applied"} if weight.level == "token" else set())
    if weight.level != "token":
        return set()
    return {"passing", "passing_weight"} if weight.record.drops_token else {"usable", "weight"}


def _needed_for_metrics(config: CorrectionConfig) -> set[str]:
    if config.metrics == "none":
        return set()
    names = {"valid", "usable", "log_ratio", "ratio_max"} | set(COUNTS)
    if weighs_tokens(config):
        names |= {"applied", "applied_squared"}
    elif config.drops_below("sequence"):
        names |= {"kept"}
    if config.metrics == "core":
        return names
    names |= {"proximal", "ratio_squared", "log_ratio_min"}
    names |= _needed_for_weights(config) if config.weight else set()
    return names | (_needed_for_step(config) if config.metrics == "all" else set())


def _needed_for_step(config: CorrectionConfig) -> set[str]:
    """For the rows of `metrics/rows.py`."""
    names = {"weighed"}
    if config.drops_below("sequence"):
        names |= {"kept"}
    for rule in config.reject:
        row = row_of(rule.statistic)
        names |= {row, row + "_min", row + "_max"} if rule.over == "token" else set()
    return names


def _needed_for_weights(config: CorrectionConfig) -> set[str]:
    """For the mean and the extremes of the weights of each sequence."""
    if not weighs_tokens(config):
        return set()
    if not monotone(config):
        zeros = {"weight_min", "weight_max"} if zero_weights(config) else set()
        return {"weight", "passing_weight_min", "passing_weight_max"} | zeros
    masks = config.weight is not None and config.weight.record.drops_token
    return {"weight"} | ({"passing_min", "passing_max"} if masks else set())
