"""Totals over each sequence or segment, all of them in one collective over context-parallel ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

import torch

from mis_plugins.config.model import CorrectionConfig, RejectRule
from mis_plugins.config.terms.statistics import row_names, row_of
from mis_plugins.correction.rejection import Totals, total_of, unit_rules
from mis_plugins.correction.token_stage import TokenStage
from mis_plugins.packing.ragged import Ragged

SUMS = (
    "valid",
    "usable",
    "proximal",
    "weighed",
    "weight",
    "passing",
    "passing_weight",
    "kept",
    "kept_weight",
)
SQUARES = ("ratio", "kept_weight", "weight")
MINIMA = ("passing", "weight", "passing_weight")
MAXIMA = ("ratio", *MINIMA)
COUNTS = ("nonfinite_train", "nonfinite_rollout")

# For each total over kept tokens, the total that takes its place where nothing is rejected.
UNREJECTED = {"kept_weight": "weight", "kept_weight_squared": "weight_squared", "kept": "usable"}


def totals_of(stage: TokenStage, ragged: Ragged, names: Iterable[str]) -> Totals:
    """Totals of each unit of `ragged`, a sequence or a segment; those of `COUNTS` are of the whole micro-batch.

    Nothing is computed or sent where no name asks for a total of a unit.
    """
    asked = set(names)
    sums, squares, minima, maxima, counts = (
        {name: row for name, row in table.items() if name in asked} for table in tables()
    )
    if not (sums or minima or maxima):
        return Totals()
    both = {row: name for name, row in squares.items() if row in sums}  # such a row is widened once
    summed = [row for row in sums if row not in both]
    squared = {name: row for name, row in squares.items() if row not in both}
    rows, marked = ragged.over_sequence(
        (stage.row(row) for row in summed),
        (stage.row(row) for row in squared.values()),
        (stage.row(row) for row in both),
        (stage.extreme(row, torch.inf) for row in minima.values()),
        (stage.extreme(row, -torch.inf) for row in maxima.values()),
        (stage.row(row) for row in counts),
    )
    named = [*summed, *squared, *itertools.chain.from_iterable(both.items()), *minima, *maxima]
    by_unit = zip(named, rows.unbind(), strict=True)
    return Totals((*by_unit, *zip(counts, marked.unbind(), strict=True)))


def tables() -> tuple[dict[str, str], ...]:
    """The row of `correction/token_stage.py` behind each sum, sum of squares, minimum, maximum and count, by its name.

    A statistic has a sum and both extremes.
    """
    statistics = row_names()
    return (
        {row: row for row in (*SUMS, *statistics)},
        {f"{row}_squared": row for row in SQUARES},
        {f"{row}_min": row for row in (*MINIMA, *statistics)},
        {f"{row}_max": row for row in (*MAXIMA, *statistics)},
        {row: row for row in COUNTS},
    )


@cache
def needed(config: CorrectionConfig) -> frozenset[str]:
    """Names of the totals that a config reads: none at token level without mean, rejection and metrics."""
    names = _needed_for_mean(config) | _needed_for_metrics(config)
    rules = unit_rules(config, "sequence")
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
    """Names of the totals that the ratio of a unit and these rules over it read."""
    return {"valid", "usable", "log_ratio"} | {total_of(rule) for rule in rules}


def weighs_tokens(config: CorrectionConfig) -> bool:
    """Whether each token has a weight of its own, of its segment, or of rules that down-weigh."""
    return bool(config.down_weighing) or (config.weight is not None and not config.weight.by_sequence)


def monotone(config: CorrectionConfig) -> bool:
    """Whether the extreme weights of a sequence are those of its extreme token ratios."""
    weight = config.weight
    if weight is None or config.segment_wise_on or config.down_weighing:
        return False
    return weight.level == "token" and weight.record.monotone


def zero_weights(config: CorrectionConfig) -> bool:
    """Whether a token may weigh 0 in a sequence whose tokens are all usable.

    The bound may give no weight, or rules over tokens may leave nothing of the token's segment.
    """
    weight = config.weight
    return weight is not None and (not weight.record.weighs_outside or config.aggregate == "kept")


def _kept_row(config: CorrectionConfig) -> str:
    """Name of the total that is 0 where no token of a sequence is kept, rules over sequences aside."""
    if weighs_tokens(config):
        return "kept_weight"
    return "kept" if config.drops_below("sequence") else "usable"


def _needed_for_mean(config: CorrectionConfig) -> set[str]:
    weight = config.weight
    if weight is None or weight.normalize is None:
        return set()
    if weight.normalize.over == "kept":
        kept = {"kept" if config.drops_below("sequence") else "usable"}
        return kept | ({"kept_weight"} if weight.level == "token" else set())
    if weight.level != "token":
        return set()
    return {"passing", "passing_weight"} if weight.record.drops_token else {"usable", "weight"}


def _needed_for_metrics(config: CorrectionConfig) -> set[str]:
    if config.metrics == "none":
        return set()
    names = {"valid", "usable", "log_ratio", "ratio_max"} | set(COUNTS)
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
    """Names of the totals that the rows of `metrics/rows.py` read."""
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
