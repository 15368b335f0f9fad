"""Faults that are planted in the routes which the engine recorded, on their way to the trainer, for `--custom-rm-path`.

A host scores a sample once the engine's routes are on it, as rows of tokens by layers by experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.in_host import reward

LAYER = 1
"""The layer that is left out."""


async def drop_a_layer(args: Any, sample: Any, **unused: Any) -> float:
    """Drop one layer's rows, so that each layer from there on gets the next layer's; the last keeps its."""
    return await _planted(args, sample, lambda rows: [*range(LAYER), *range(LAYER + 1, rows), rows - 1])


async def swap_stages(args: Any, sample: Any, **unused: Any) -> float:
    """Let the rows of the last layers come first, as where two pipeline stages are joined in the wrong order."""
    return await _planted(args, sample, lambda rows: [*range(rows // 2, rows), *range(rows // 2)])


async def repeat_a_row(args: Any, sample: Any, **unused: Any) -> float:
    """Give all tokens of one sample of each rollout the rows of its first token."""
    if sample.index % reward.ROLLOUT == reward.BROKEN:
        rows = sample.rollout_routed_experts
        sample.rollout_routed_experts = rows[[0] * len(rows)]
    return await reward.score(args, sample)


async def _planted(args: Any, sample: Any, order: Callable[[int], list[int]]) -> float:
    rows = sample.rollout_routed_experts
    sample.rollout_routed_experts = rows[:, order(rows.shape[1])]
    return await reward.score(args, sample)
