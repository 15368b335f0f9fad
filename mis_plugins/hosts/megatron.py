"""Process groups: Megatron's own, for every host that hands a hook no groups, and the groups that Miles hands over."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mis_plugins.hosts.host import Batch, Parallel, Ranks, Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mis_plugins.hosts.needs import Needs


def untold() -> bool:
    """Whether this is one of several processes, and Megatron has made no groups of them."""
    distributed = sys.modules.get("torch.distributed")
    several = distributed is not None and distributed.is_initialized() and distributed.get_world_size() > 1
    return several and _mpu() is None


def parallel() -> Parallel:
    """The groups of `megatron.core.mpu`, and (size, rank) of context parallelism; one process without Megatron."""
    from mis_plugins.packing.ragged import Ranks

    mpu = _mpu()
    if mpu is None:
        return Ranks(), (1, 0)
    cp, tp = mpu.get_context_parallel_group(), mpu.get_tensor_model_parallel_group()
    dp = mpu.get_data_parallel_group(with_context_parallel=False)
    ranks = Ranks(*(group if group.size() > 1 else None for group in (cp, dp, tp)))
    return ranks, (cp.size(), cp.rank())


def handed(parallel_state: Any) -> Parallel:
    """The groups of the `parallel_state` that Miles hands over, and (size, rank) of context parallelism.

    Under Ulysses (`--cp-comm-type a2a`) too Miles cuts tokens and log-probs zigzag (`cp_utils.slice_log_prob_with_cp`).
    """
    from mis_plugins.packing.ragged import Ranks

    cp, dp, tp = parallel_state.cp, parallel_state.effective_dp, parallel_state.tp
    ranks = Ranks(*(info.group if info.size > 1 else None for info in (cp, dp, tp)))
    return ranks, (cp.size, cp.rank)


def reports(ranks: Ranks) -> bool:
    """Whether this is the first rank of each group, on which hosts set their tracking up."""
    mpu = _mpu()
    first_of_tensor = mpu is None or mpu.get_tensor_model_parallel_rank() == 0
    return first_of_tensor and all(group is None or group.rank() == 0 for group in (ranks.cp, ranks.dp))


def holds_log_probs() -> bool:
    """Whether this rank computes log-probs: the last pipeline stage alone does."""
    mpu = _mpu()
    return mpu is None or mpu.is_pipeline_last_stage(ignore_virtual=True)


def pipeline() -> "tuple[ProcessGroup | None, int]":
    """The pipeline-parallel group, None where there is one stage, and the stage of this rank."""
    mpu = _mpu()
    if mpu is None:
        return None, 0
    group = mpu.get_pipeline_model_parallel_group()
    return (group if group.size() > 1 else None), group.rank()


def tensor() -> tuple[int, int]:
    """Size and rank of tensor parallelism."""
    mpu = _mpu()
    return (1, 0) if mpu is None else (mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank())


def arguments() -> Any:
    """The host's arguments as it gave them to Megatron, or None."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    return getattr(global_vars, "_GLOBAL_ARGS", None)


def rescore(needs: "Needs", args: Any, data: Batch, ranks: Ranks) -> Sequence[Tensor] | None:
    """A second log-prob pass of the trainer of a host with these needs, for `Host.rescore`."""
    from mis_plugins.hosts.resplit import rescored

    return rescored(needs, args, data, ranks)


def _mpu() -> ModuleType | None:
    mpu = sys.modules.get("megatron.core.parallel_state")
    return mpu if mpu is not None and mpu.model_parallel_is_initialized() else None
