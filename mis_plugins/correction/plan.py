"""What a config drops, weighs and reads, derived once into a plan that each micro-batch follows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from mis_plugins.config.model import CorrectionConfig, NormalizeConfig, Population, RejectRule, Unit, WeightConfig
from mis_plugins.config.terms.statistics import row_names, row_of

SUMS = """valid usable proximal weighed weight passing passing_weight kept kept_weight nonfinite_train
    nonfinite_rollout""".split()
SQUARES = ("ratio", "kept_weight", "weight")
MINIMA = ("passing", "weight", "passing_weight")
MAXIMA = ("ratio", *MINIMA)
UNREJECTED = {"kept_weight": "weight", "kept_weight_squared": "weight_squared", "kept": "usable"}
"""For each total over kept tokens, the total that takes its place where nothing is rejected."""


@dataclass(frozen=True)
class Reads:
    """The totals of a unit that are made: by its name, the row of `TokenStage` that each adds up or competes in."""

    sums: Mapping[str, str]
    squares: Mapping[str, str]
    minima: Mapping[str, str]
    maxima: Mapping[str, str]

    @classmethod
    def of(cls, names: Iterable[str]) -> "Reads":
        """The rows behind the totals of these names; a statistic has a sum and both extremes."""
        asked, statistics = set(names), row_names()
        tables = (
            {row: row for row in (*SUMS, *statistics)},
            {f"{row}_squared": row for row in SQUARES},
            {f"{row}_min": row for row in (*MINIMA, *statistics)},
            {f"{row}_max": row for row in (*MAXIMA, *statistics)},
        )
        return cls(*({name: row for name, row in table.items() if name in asked} for table in tables))


@dataclass(frozen=True)
class UnitPlan:
    """What one kind of unit, segments or sequences, weighs and drops.

    weight: None where the weight is of other units, or of tokens.
    population: tokens that the weight reads.
    rules: rules over units of this kind, by the population of tokens that they read.
    reads: the totals of a unit over each population of tokens, in the order of their collectives.
    masks: the weight, where its bound drops units, by the population that it reads; else empty.
    """

    weight: WeightConfig | None
    population: Population
    rules: Mapping[Population, tuple[RejectRule, ...]]
    reads: Mapping[Population, Reads]
    masks: Mapping[Population, WeightConfig]


@dataclass(frozen=True)
class Plan:
    """What one config does to each micro-batch.

    weight: the weight of tokens; None where the weight is of larger units.
    token_rules, down_weighing: rules over tokens that drop, and rules that multiply the weight.
    drops_parts: whether parts of a sequence can be dropped: tokens, or segments.
    segments: None where the config has neither weight nor rule of segments.
    normalize: None where the weights are not divided by their mean.
    """

    config: CorrectionConfig
    weight: WeightConfig | None
    token_rules: tuple[RejectRule, ...]
    down_weighing: tuple[RejectRule, ...]
    drops_parts: bool
    segments: UnitPlan | None
    sequences: UnitPlan
    normalize: NormalizeConfig | None


@cache
def plan_of(config: CorrectionConfig) -> Plan:
    """The plan of a config."""
    weight = config.weight
    of_segments = _unit_rules(config, "segment")
    return Plan(
        config=config,
        weight=weight if weight is not None and weight.level == "token" else None,
        token_rules=tuple(rule for rule in config.reject if rule.over == "token" and rule.drops),
        down_weighing=config.down_weighing,
        drops_parts=config.drops_below("sequence"),
        segments=_segments(config) if of_segments or (weight and weight.by_segment) else None,
        sequences=_sequences(config),
        normalize=weight.normalize if weight else None,
    )


def _segments(config: CorrectionConfig) -> UnitPlan:
    weight, rules = config.weight, _unit_rules(config, "segment")
    names = _needed_for_units(rules) | ({"kept"} if config.drops_below("sequence") else set())
    populations: set[Population] = {config.weight_population, *map(config.population, rules)}
    reads: dict[Population, Reads] = {population: Reads.of(names) for population in sorted(populations)}
    return _unit_plan(config, weight if weight and weight.by_segment else None, rules, reads)


def _sequences(config: CorrectionConfig) -> UnitPlan:
    weight, rules = config.weight, _unit_rules(config, "sequence")
    reads: dict[Population, Reads] = {"valid": Reads.of(needed(config))}
    if config.aggregate == "kept" or _by_population(config, rules)["kept"]:
        reads["kept"] = Reads.of(_needed_for_units(rules))
    return _unit_plan(config, weight if weight and weight.by_sequence else None, rules, reads)


def _unit_plan(
    config: CorrectionConfig,
    weight: WeightConfig | None,
    rules: Iterable[RejectRule],
    reads: Mapping[Population, Reads],
) -> UnitPlan:
    masks: dict[Population, WeightConfig] = {}
    if weight and weight.record.drops_token:
        masks = {config.weight_population: weight}
    return UnitPlan(weight, config.weight_population, _by_population(config, rules), reads, masks)


def _unit_rules(config: CorrectionConfig, unit: Unit) -> list[RejectRule]:
    """Rules over units of this kind; rules over tokens are of neither kind."""
    return [rule for rule in config.reject if rule.over != "token" and rule.unit == unit]


def _by_population(config: CorrectionConfig, rules: Iterable[RejectRule]) -> dict[Population, tuple[RejectRule, ...]]:
    split: dict[Population, tuple[RejectRule, ...]] = {"valid": (), "kept": ()}
    for rule in rules:
        split[config.population(rule)] += (rule,)
    return split


@cache
def total_of(rule: RejectRule) -> str:
    """The name of the total that a rule over a unit reads."""
    return row_of(rule.statistic) + {"min": "_min", "max": "_max"}.get(rule.over, "")


def needed(config: CorrectionConfig) -> frozenset[str]:
    """Names of the totals that a config reads: none at token level without mean, rejection and metrics."""
    names = _needed_for_mean(config) | _needed_for_metrics(config)
    rules = _unit_rules(config, "sequence")
    if rules or (config.weight and config.weight.by_sequence):
        names |= _needed_for_units(rules)
    if config.can_end_empty:
        names |= {"valid", "kept_weight" if weighs_tokens(config) else _kept_row(config)}
    if config.denominator == "kept":
        names |= {"valid", _kept_row(config)}
    if config.on_all_rejected == "keep":
        names |= {UNREJECTED[name] for name in names & set(UNREJECTED)}
    return frozenset(names)


def _needed_for_units(rules: Iterable[RejectRule]) -> set[str]:
    """Names of the totals that the ratio of a unit and these rules over it read."""
    return {"valid", "usable", "log_ratio"} | {total_of(rule) for rule in rules}


@cache
def weighs_tokens(config: CorrectionConfig) -> bool:
    """Whether each token has a weight of its own, of its segment, or of rules that down-weigh."""
    return bool(config.down_weighing) or (config.weight is not None and not config.weight.by_sequence)


@cache
def monotone(config: CorrectionConfig) -> bool:
    """Whether the extreme token ratios of a sequence have its extreme weights."""
    weight = config.weight
    if weight is None or config.segment_wise_on or config.down_weighing:
        return False
    return weight.level == "token" and weight.record.monotone


@cache
def zero_weights(config: CorrectionConfig) -> bool:
    """Whether a token may weigh 0 in a sequence whose tokens are all usable.

    The bound may give no weight, or rules over tokens may leave nothing of the token's segment.
    """
    weight = config.weight
    return weight is not None and (not weight.record.weighs_outside or config.aggregate == "kept")


def _kept_row(config: CorrectionConfig) -> str:
    """Name of the total that counts the kept tokens of a sequence, rules over sequences aside."""
    return "kept" if config.drops_below("sequence") else "usable"


def _needed_for_mean(config: CorrectionConfig) -> set[str]:
    weight = config.weight
    if weight is None or weight.normalize is None:
        return set()
    if weight.normalize.over == "kept":
        return {_kept_row(config)} | ({"kept_weight"} if weight.level == "token" else set())
    if weight.level != "token":
        return set()
    return {"passing", "passing_weight"} if weight.record.drops_token else {"usable", "weight"}


def _needed_for_metrics(config: CorrectionConfig) -> set[str]:
    if config.metrics == "none":
        return set()
    names = {"valid", "usable", "log_ratio", "ratio_max"} | {"nonfinite_train", "nonfinite_rollout"}
    if weighs_tokens(config):
        names |= {"kept_weight", "kept_weight_squared"}
    elif config.drops_below("sequence"):
        names |= {"kept"}
    if config.metrics == "core":
        return names
    names |= {"proximal", "ratio_squared", "log_ratio_min"}
    names |= _needed_for_weights(config)
    return names | (_needed_for_step(config) if config.reports_step else set())


def _needed_for_step(config: CorrectionConfig) -> set[str]:
    """Names of the totals that the quantities of a step read."""
    names = {"weighed"}
    if config.drops_below("sequence"):
        names |= {"kept"}
    for rule in config.reject:
        row = row_of(rule.statistic)
        names |= {row, row + "_min", row + "_max"} if rule.over == "token" else set()
    return names


def _needed_for_weights(config: CorrectionConfig) -> set[str]:
    """Names of the totals behind the mean and the extremes of the weights of each sequence."""
    if not weighs_tokens(config):
        return set()
    if not monotone(config):
        zeros = {"weight_min", "weight_max"} if zero_weights(config) else set()
        return {"weight", "passing_weight_min", "passing_weight_max"} | zeros
    masks = config.weight is not None and config.weight.record.drops_token
    return {"weight"} | ({"passing_min", "passing_max"} if masks else set())
