"""What `torch.cuda` answers in a trainer without a GPU: every device is the CPU, and memory and streams are empty.

Only trainers take these answers. An engine that saw them would take itself for a GPU's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand",
    "randint", "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip
MEMORY = 64 << 30
"""Free bytes: below 3 GiB slime collects garbage at every collective (slime/utils/reloadable_process_group.py:488)."""
METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def install(module: ModuleType) -> None:
    """Answer for the GPU in this process, once; `module` is a module that trainers import."""
    import torch
    from torch.utils._device import _device_constructors

    if torch.cuda.Stream is Stream:
        return
    # `with torch.device(...)` looks up torch's factories once, and must do so before they are wrapped below.
    # Otherwise transformers builds no model on "meta", and leaves the frequencies of rope uninitialized.
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    _answer_for_tensors(torch)
    _answer_for_cuda(torch)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch so that a GPU which it is given becomes the CPU, and nothing is pinned."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        args = tuple("cpu" if _is_gpu(argument) else argument for argument in args)
        return function(*args, **{name: "cpu" if _is_gpu(value) else value for name, value in kwargs.items()})

    return wrapped


def _is_gpu(value: Any) -> bool:
    import torch

    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _answer_for_tensors(torch: Any) -> None:
    stated = torch.Tensor.type

    def type_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = stated(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_of
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_: self


class Stream:
    """A stream or an event that has always just finished."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0.0

    def record_event(self, *_: Any) -> Stream:
        """Return an event that has finished already."""
        return Stream()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Properties:
    """A GPU's properties, for hosts that print them."""

    name, total_memory, major, minor, multi_processor_count, uuid = ("a CPU that answers for a GPU", 1, 9, 0, 1, "0")


def _answer_for_cuda(torch: Any) -> None:
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "init"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    for name in ("current_stream", "default_stream", "Stream", "Event"):
        setattr(cuda, name, Stream)
    cuda.stream = lambda *_: nullcontext()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.device_count = lambda: 1
    cuda.mem_get_info = lambda *_: (MEMORY, MEMORY)
    cuda.memory_stats = lambda *_: {}
    cuda.get_device_properties = lambda *_: Properties
    cuda.get_device_name = lambda *_: Properties.name
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = lambda seed: None  # torch.manual_seed calls it, and seeds the CPU itself
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda *_, **__: torch.get_rng_state()
        owner.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def share_the_generator(module: ModuleType) -> None:
    """Let Megatron's tracker of random states keep the CPU's own state."""
    import torch

    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # pyright: ignore[reportAttributeAccessIssue]
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # pyright: ignore[reportAttributeAccessIssue]
