"""Tensors on their way from the device to the host, with nobody waiting for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor


def to_host(x: Shaped[Tensor, "*S"]) -> Shaped[Tensor, "*S"]:
    """A copy in pinned memory, begun and not awaited; `x` itself where it lies on the host already."""
    if not x.is_cuda:
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


@dataclass(frozen=True)
class Arrival:
    """When what was begun before it is there; `event` is None where nothing had to travel."""

    event: torch.cuda.Event | None

    @classmethod
    def of_copies_from(cls, x: Tensor) -> Arrival:
        """Of every copy begun so far on the stream that computes `x`."""
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
