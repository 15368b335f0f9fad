"""Weights and rules of segments, a segment being a run of ones in the loss mask: one turn of the model.

Weight and verdict of a segment become a weight and a mask on each of its tokens, so that the rest of the pipeline knows
no segments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.model import Population, WeightConfig
from mis_plugins.correction.plan import UnitPlan
from mis_plugins.correction.rejection import Totals, kept_units, known_log_ratio, passing_units, unit_weight
from mis_plugins.correction.token_stage import TokenStage, totals_by_population
from mis_plugins.packing.ragged import Ragged, run_of_token


@dataclass(frozen=True)
class Segments:
    """S segments in the order of the tokens. S is the largest possible number: the last segments may have no token.

    ragged: the local tokens packed by segment. A masked token lies in any segment, and enters no total.
    owner: the sequence of each segment.
    """

    ragged: Ragged
    owner: Int[Tensor, " S"]

    @classmethod
    def of(cls, sequences: Ragged) -> "Segments":
        whole = sequences.responses
        starts, mask = (sequences if whole is None else whole).cu_seqlens, (whole or sequences).loss_mask
        size = (mask.numel() + sequences.size) // 2 + 1  # runs of n tokens number at most (n + 1) / 2
        numbers = torch.arange(1, size + 2, device=mask.device)
        of_token = run_of_token(starts, mask)
        first = torch.searchsorted(of_token, numbers[:-1])
        owner = torch.searchsorted(starts, first, right=True).sub_(1).clamp_(max=max(sequences.size - 1, 0))
        local = of_token.clamp_(min=1) if whole is None else of_token.clamp_(min=1).index_select(0, whole.index)
        # Response tokens keep their order on every rank, so that local numbers never decrease.
        bounds = torch.searchsorted(local, numbers)
        return cls(Ragged(bounds, sequences.loss_mask, sequences.ranks), owner)


@dataclass(frozen=True)
class SegmentStage:
    """Totals, weight and verdict of S segments.

    by_population: totals of each segment (see `correction/plan.py`), over all valid tokens or over
        the kept tokens, as weights and rules ask.
    totals: totals over the population that the weight reads.
    keep: segments that mask bound and rules over segments keep, with a token that rules over tokens keep;
        None where nothing can be dropped.
    weight: bounded; 0 where the segment is not known. None where the weight is not of segments.
    """

    segments: Segments
    by_population: Mapping[Population, Totals]
    totals: Totals
    keep: Bool[Tensor, " S"] | None
    weight: Float[Tensor, " S"] | None


def segment_stage(stage: TokenStage, ragged: Ragged, plan: UnitPlan) -> tuple[TokenStage, SegmentStage]:
    """Add weights and rules of segments to the stage of the tokens.

    One collective over context-parallel ranks for each population that is read: valid tokens, kept tokens.
    """
    segments = Segments.of(ragged)
    by_population = totals_by_population(stage, segments.ragged, plan)
    totals = by_population[plan.population]
    keep = kept_units(by_population, plan)
    if stage.keep is not None:
        stage = stage if keep is None else replace(stage, keep=stage.keep & segments.ragged.to_tokens(keep))
        kept = totals["kept"] > 0
        keep = kept if keep is None else keep & kept
    if plan.weight is None:
        return stage, SegmentStage(segments, by_population, totals, keep, None)
    bounded = unit_weight(totals, plan.weight)
    stage = _weighted(stage, totals, bounded, segments.ragged, plan.weight)
    return stage, SegmentStage(segments, by_population, totals, keep, bounded)


def _weighted(
    stage: TokenStage, of_segment: Totals, bounded: Float[Tensor, " S"], segments: Ragged, weight: WeightConfig
) -> TokenStage:
    spread = segments.to_tokens
    return replace(
        stage,
        unit_log_ratio=spread(known_log_ratio(of_segment, weight).float()),
        bounded=torch.where(stage.usable, spread(bounded.float()), 0),
        passing=stage.usable & spread(passing_units(of_segment, weight)),
    )
