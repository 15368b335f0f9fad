"""Copies of tensors from the device to the host, begun without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor


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
    def of_copies_from(cls, x: Tensor) -> Arrival:
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
