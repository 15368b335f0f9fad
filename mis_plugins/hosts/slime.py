"""slime hands the hook no groups: they are Megatron's own."""

from __future__ import annotations

import sys
from types import ModuleType

from mis_plugins.packing.ragged import Ranks


def parallel() -> tuple[Ranks, tuple[int, int]]:
    """The groups of `megatron.core.mpu`, and (size, rank) of context parallelism; one process without Megatron."""
    mpu = _mpu()
    if mpu is None:
        return Ranks(), (1, 0)
    cp, tp = mpu.get_context_parallel_group(), mpu.get_tensor_model_parallel_group()
    dp = mpu.get_data_parallel_group(with_context_parallel=False)
    ranks = Ranks(*(group if group.size() > 1 else None for group in (cp, dp, tp)))
    return ranks, (cp.size(), cp.rank())


def holds_log_probs() -> bool:
    """Only the last pipeline stage computes log-probs."""
    mpu = _mpu()
    return mpu is None or mpu.is_pipeline_last_stage(ignore_virtual=True)


def _mpu() -> ModuleType | None:
    mpu = sys.modules.get("megatron.core.parallel_state")
    return mpu if mpu is not None and mpu.model_parallel_is_initialized() else None
