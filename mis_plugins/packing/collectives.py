"""Sums over ranks where one of them may die: Miles's torchft lets the others live, and repeats the step."""

from __future__ import annotations

import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

RANK_LOST = (RuntimeError, OSError)
"""What a collective raises where another rank has died."""


def all_reduce(
    x: Shaped[Tensor, "..."], group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce `x` in place over a group, torch's own or one of torchft's.

    A group of torchft's is asked itself: torch's function words an error with the name of the group, which it does not
    know, and raises a ValueError of that in place of the error. In torchft's group `wait` may return False in place of
    an error, and once aborted the group asserts that it has none inside.

    Raises:
        RANK_LOST: a rank of the group died.
    """
    if not hasattr(group, "errored"):
        dist.all_reduce(x, op, group=group)
        return
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    try:
        work = group.allreduce([x], options)
        is_done = work is None or work.wait()
    except AssertionError as error:
        raise RuntimeError(f"torchft's group was aborted: {error}") from error
    if not is_done:
        raise RuntimeError("a collective of torchft's group failed")


def discard_step(group: dist.ProcessGroup) -> None:
    """See to it that Miles discards the step in which a collective of torchft's group failed, and repeats it.

    Miles does where the group tells an error, or fails in the sum of gradients; an aborted group does either. A group
    over gloo never tells one, and one over NCCL tells none that was raised.
    """
    if group.errored() is None:  # type: ignore[attr-defined]
        group.abort()
