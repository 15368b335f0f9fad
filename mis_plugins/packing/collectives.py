"""Reductions in which another rank may die, and copies from the device to the CPU, which nothing waits for.

With Miles's torchft the other ranks live on and repeat the step.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

RANK_LOST = (RuntimeError, OSError)
"""What a collective raises where another rank has died."""


def all_reduce(
    x: Shaped[Tensor, "..."], group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce `x` in place over a group, torch's own or one of torchft's.

    torchft's group is called directly. torch's own function puts the group's name into an error, does not know the
    name, and raises a ValueError that hides the error. In torchft's group `wait` may return False in place of an error,
    and an aborted group raises an AssertionError. RANK_LOST is raised where a rank of the group died.
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
    """Make Miles discard and repeat the step in which a collective of torchft's group failed.

    Miles discards a step where the group reports an error, or fails in the sum of gradients; an aborted group
    does either. Without an abort, a gloo group never reports an error, and an NCCL group none that it raised.
    """
    if group.errored() is None:  # type: ignore[attr-defined]
        group.abort()


def to_host(x: Shaped[Tensor, "*S"]) -> Shaped[Tensor, "*S"]:
    """Begin a copy of `x` into pinned memory without waiting; return `x` itself where the host holds it already."""
    if not x.is_cuda:
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


@dataclass(frozen=True)
class Arrival:
    """The arrival of all copies begun earlier; `event` is None where the host held everything already."""

    event: torch.cuda.Event | None

    @classmethod
    def of_copies_from(cls, x: Tensor) -> "Arrival":
        """Arrival of every copy begun so far on the stream that computes `x`."""
        if not x.is_cuda:
            return cls(None)
        event = torch.cuda.Event()
        event.record()
        return cls(event)

    @property
    def ready(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
