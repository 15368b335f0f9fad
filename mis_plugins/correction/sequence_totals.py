"""Totals over each sequence or segment, all of them in one collective over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mis_plugins.config.model import Population
from mis_plugins.correction.plan import Reads, UnitPlan
from mis_plugins.correction.plan import monotone as monotone
from mis_plugins.correction.plan import weighs_tokens as weighs_tokens
from mis_plugins.correction.plan import zero_weights as zero_weights
from mis_plugins.correction.rejection import Totals
from mis_plugins.correction.token_stage import TokenStage, narrowed
from mis_plugins.packing.ragged import Ragged


def totals_of(stage: TokenStage, ragged: Ragged, reads: Reads) -> Totals:
    """Totals of each unit of `ragged`, a sequence or a segment; no collective where the plan reads none."""
    if not (reads.sums or reads.squares or reads.minima or reads.maxima):
        return Totals()
    return Totals(
        ragged.totals(
            {name: stage.row(row) for name, row in reads.sums.items()},
            {name: stage.row(row) for name, row in reads.squares.items()},
            {name: stage.extreme(row, torch.inf) for name, row in reads.minima.items()},
            {name: stage.extreme(row, -torch.inf) for name, row in reads.maxima.items()},
        )
    )


def totals_by_population(stage: TokenStage, ragged: Ragged, plan: UnitPlan) -> Mapping[Population, Totals]:
    """Totals of each unit over all valid tokens, or over the kept tokens, as its weight and rules ask."""
    return {
        population: totals_of(narrowed(stage) if population == "kept" else stage, ragged, reads)
        for population, reads in plan.reads.items()
    }
