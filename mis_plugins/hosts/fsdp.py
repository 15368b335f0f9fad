"""Miles on FSDP: every response whole on its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mis_plugins.errors import InputError
from mis_plugins.hosts import miles
from mis_plugins.ragged import Ranks

USE_CP = "use --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"


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
            f"compute_mis_weights_fsdp: {size} context-parallel ranks split the responses; {USE_CP}"
        )
    return miles.parallel(parallel_state)[0]


def check_whole(rollout_log_probs: Sequence[Tensor] | None, loss_masks: Sequence[Tensor]) -> None:
    """Refuse pieces of responses, which only context parallelism makes."""
    for i, (log_probs, mask) in enumerate(zip(rollout_log_probs or (), loss_masks, strict=False)):
        if log_probs is not None and log_probs.numel() < mask.numel():
            raise InputError(
                f"compute_mis_weights_fsdp: rollout_log_probs[{i}] holds {log_probs.numel()} of {mask.numel()} "
                f"response tokens; if context parallelism splits the responses, {USE_CP}"
            )
