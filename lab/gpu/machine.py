"""The accelerator as the sections use it; `dry_run` puts the CPU in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

Call = Callable[[], Any]


def moved(value: Any, device: torch.device) -> Any:
    """What a host hands to a hook, with each tensor in it on the device, and leaves of autograd still leaves."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    return [moved(each, device) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Cuda:
    """The CUDA device of this process."""

    device = torch.device("cuda")

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def milliseconds(self, call: Call, at_least: int = 100) -> float:
        """Return the median time of calls over `at_least` milliseconds, by device events; the L2 cache is flushed."""
        from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

        return cast(float, do_bench(call, rep=at_least, return_mode="median"))

    def peak_bytes(self, call: Call) -> int:
        """Return the most bytes that a call held at once, beyond the bytes held before the call."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = call()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """Raise a RuntimeError where the host waits for the device."""
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
