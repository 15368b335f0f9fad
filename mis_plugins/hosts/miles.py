"""Miles hands its `parallel_state` to the hook; under fault tolerance Megatron's own data-parallel group is wrong."""

from __future__ import annotations

from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.ragged import Ranks


def parallel(parallel_state: Any) -> tuple[Ranks, tuple[int, int]]:
    """The groups of Miles's `parallel_state`, and (size, rank) of context parallelism.

    Raises:
        InputError: Ulysses context parallelism, whose log-probs are not zigzag.
    """
    if getattr(parallel_state, "is_ulysses_cp", False):
        raise InputError(
            "parallel_state.is_ulysses_cp: mis_plugins reads zigzag context parallelism only; "
            "drop --cp-comm-type a2a or use --context-parallel-size 1"
        )
    cp, dp = parallel_state.cp, parallel_state.effective_dp
    ranks = Ranks(cp.group if cp.size > 1 else None, dp.group if dp.size > 1 else None)
    return ranks, (cp.size, cp.rank)
