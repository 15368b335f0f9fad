"""Weights and rules of segments, a segment being a run of ones in the loss mask: one turn of the model.

Weight and verdict of a segment become a weight and a mask on each of its tokens, so that the rest of the pipeline knows
no segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig, Population, WeightConfig
from mis_plugins.correction.rejection import Totals
from mis_plugins.correction.totals import TokenStage, narrowed, needed_for_units, segment_rules, totals_of
from mis_plugins.correction.units import kept_by_population, known_log_ratio, passing_units, unit_weight
from mis_plugins.packing.ragged import Ragged, Segments


@dataclass(frozen=True)
class SegmentStage:
    """What is known of S segments.

    looked_at: what each adds up to, see `correction/totals.py`: of all valid tokens, or of the kept, as weights and
        rules ask.
    totals: totals that the weights read, and rules that name no population of their own.
    keep: what passes mask bound and rules over segments and has a token that passes those over tokens; None where
        nothing can be dropped.
    weight: bounded; 0 where the segment is not known. None where the weights are not those of segments.
    """

    segments: Segments
    looked_at: Mapping[Population, Totals]
    totals: Totals
    keep: Bool[Tensor, " S"] | None
    weight: Float[Tensor, " S"] | None


def needs_segments(config: CorrectionConfig) -> bool:
    return bool(segment_rules(config)) or (config.weight is not None and config.weight.by_segment)


def segment_stage(
    stage: TokenStage, ragged: Ragged, config: CorrectionConfig
) -> tuple[TokenStage, SegmentStage]:
    """The stage of the tokens with weights and rules of segments in it.

    One collective over context-parallel ranks, and another where some look at valid tokens and some at kept ones.
    """
    segments, rules = ragged.segments, segment_rules(config)
    names = needed_for_units(rules) | ({"kept"} if stage.keep is not None else set())
    populations: set[Population] = {config.weight_population, *map(config.population, rules)}
    looked_at: dict[Population, Totals] = {
        population: totals_of(narrowed(stage) if population == "kept" else stage, segments.ragged, names)
        for population in sorted(populations)  # the collectives come in one order on every rank
    }
    of_segment = looked_at[config.weight_population]
    weight = config.weight if config.weight and config.weight.by_segment else None
    keep = kept_by_population(looked_at, config, rules, weight)
    if stage.keep is not None:
        stage = stage if keep is None else replace(stage, keep=stage.keep & segments.ragged.to_tokens(keep))
        left = of_segment["kept"] > 0
        keep = left if keep is None else keep & left
    if weight is None:
        return stage, SegmentStage(segments, looked_at, of_segment, keep, None)
    bounded = unit_weight(of_segment, weight)
    stage = _weighted(stage, of_segment, bounded, segments.ragged, weight)
    return stage, SegmentStage(segments, looked_at, of_segment, keep, bounded)


def _weighted(
    stage: TokenStage,
    of_segment: Totals,
    bounded: Float[Tensor, " S"],
    segments: Ragged,
    weight: WeightConfig,
) -> TokenStage:
    spread = segments.to_tokens
    return replace(
        stage,
        unit_log_ratio=spread(known_log_ratio(of_segment, weight).float()),
        weight=torch.where(stage.usable, spread(bounded.float()), 0),
        passing=stage.usable & spread(passing_units(of_segment, weight)),
    )
