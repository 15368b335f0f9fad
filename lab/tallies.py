"""Tally what a function does: operators, waits for the device, copies to it, collectives, memory.

Waits and copies are read from the operators that make them on CUDA, so that a machine without CUDA can count
them. An operator waits if it reads a value on the host, or if its output size depends on data (nonzero, a
boolean index, ...).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALWAYS_WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "bincount",
    "allclose",
)


@dataclass
class Tally:
    """The counts of a call.

    operators: dispatched operators, views included, collectives left out.
    waits: operators that make the host wait for the device, by name.
    copies: tensors made from host data.
    collectives, collective_bytes: collectives by name, and the bytes that this rank puts into them.
    """

    operators: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: int = 0


class Tallying(TorchDispatchMode):
    """A dispatch mode that counts every operator below autograd, and collectives separately."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if func.namespace == "c10d":
            self.tally.collectives[name] += 1
            self.tally.collective_bytes += _bytes_given(name, args)
        else:
            self.tally.operators += 1
            self.tally.waits.update([name] if _waits(name, func, args, kwargs or {}) else [])
            self.tally.copies += name == "lift_fresh"
        return func(*args, **(kwargs or {}))


def _waits(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if name in ALWAYS_WAITS:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return name == "_to_copy" and kwargs.get("device") == torch.device("cpu") and args[0].device.type != "cpu"


def _bytes_given(name: str, args: Any) -> int:
    """Count the bytes that this rank puts into a collective: a gather's second argument, a reduction's first."""
    given = args[1] if "allgather" in name else args[0]
    return sum(x.numel() * x.element_size() for x in tree_leaves(given) if isinstance(x, torch.Tensor))


def tally(function: Callable[[], Any]) -> Tally:
    with Tallying() as counting:
        function()
    return counting.tally


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the largest sum of CPU tensor bytes that `function` held at once, by the profiler's allocator events."""
    with _silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recording:
        kept = function()
    del kept
    recorded: Any = recording.profiler
    events = (event for event in recorded.kineto_results.events() if event.name() == "[memory]")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    return max(accumulate((nbytes for _, nbytes in changes), initial=0))


@contextmanager
def _silenced() -> Iterator[None]:
    """Silence the process's standard error below Python, where the profiler announces itself."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
