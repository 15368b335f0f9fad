"""Miles on FSDP: every response whole on its rank."""

from __future__ import annotations

from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts import miles
from mis_plugins.ragged import Ranks


def ranks(parallel_state: Any | None) -> Ranks:
    """The data-parallel group, where one is handed.

    Raises:
        InputError: the responses are spread over context-parallel ranks.
    """
    if parallel_state is None:
        return Ranks()
    size = parallel_state.cp.size
    if size > 1:
        raise InputError(
            f"compute_mis_weights_fsdp: called with context parallelism ({size} ranks) but it expects whole responses; "
            "use --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
        )
    return miles.ranks(parallel_state)
