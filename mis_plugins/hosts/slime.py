"""slime hands the hook no groups: they are Megatron's own."""

from __future__ import annotations

import sys
from types import ModuleType

from mis_plugins.ragged import Ranks


def parallel() -> tuple[Ranks, tuple[int, int]]:
    """The groups of `megatron.core.mpu`, and (size, rank) of context parallelism; one process without Megatron."""
    mpu = _mpu()
    if mpu is None:
        return Ranks(), (1, 0)
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    dp = mpu.get_data_parallel_group(with_context_parallel=False)
    return Ranks(mpu.get_context_parallel_group() if size > 1 else None, dp if dp.size() > 1 else None), (
        size,
        rank,
    )


def holds_log_probs() -> bool:
    """Only the last pipeline stage computes log-probs."""
    mpu = _mpu()
    return mpu is None or mpu.is_pipeline_last_stage(ignore_virtual=True)


def _mpu() -> ModuleType | None:
    mpu = sys.modules.get("megatron.core.parallel_state")
    return mpu if mpu is not None and mpu.model_parallel_is_initialized() else None
