"""Miles hands its `parallel_state` to the hook; under fault tolerance Megatron's own data-parallel group is wrong."""

from __future__ import annotations

from typing import Any

from mis_plugins.packing.ragged import Ranks


def parallel(parallel_state: Any) -> tuple[Ranks, tuple[int, int]]:
    """The groups of Miles's `parallel_state`, and (size, rank) of context parallelism.

    Under Ulysses (`--cp-comm-type a2a`) too Miles cuts tokens and log-probs zigzag (`cp_utils.slice_log_prob_with_cp`).
    """
    cp, dp, tp = parallel_state.cp, parallel_state.effective_dp, parallel_state.tp
    ranks = Ranks(*(info.group if info.size > 1 else None for info in (cp, dp, tp)))
    return ranks, (cp.size, cp.rank)


def is_first(parallel_state: Any) -> bool:
    """Whether Miles logs on this rank, among those of the last pipeline stage.

    Miles keeps the numbers itself: under fault tolerance a group is torchft's, whose `rank()` is 0 in each cell.
    """
    return all(info.rank == 0 for info in (parallel_state.cp, parallel_state.effective_dp, parallel_state.tp))
