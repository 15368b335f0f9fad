"""FlashAttention-3 with one split: several splits add up a row's keys in parts whose number depends on the batch.

FlashAttention-3 has no switch. `num_splits` is an argument of each call, 0 ("choose") by default where a cache is read.
Callers hold the functions under names of their own, so the pin replaces each held function by one that passes 1.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import NotSeenError, PinError
from true_on_policy.kernels.probes import Failure, attention_failures
from true_on_policy.kernels.provider import (
    Undo,
    device,
    findable,
    imported,
    installed,
    replace_everywhere,
    undone_on_error,
)

NAME = "flash_attention"
# The module of each FlashAttention-3 build, in the order in which Miles looks, and the build's distributions.
INTERFACES = {
    "flash_attn_interface": ("flash-attn-3", "flash_attn_3"),
    "flash_attn_3.flash_attn_interface": ("flash-attn-3", "flash_attn_3"),
    "flashattn_hopper.flash_attn_interface": ("flashattn-hopper",),
    "fa3_fwd_interface": ("fa3-fwd",),
    "sgl_kernel.flash_attn": ("sglang-kernel", "sgl-kernel"),
}
SPLITS = "num_splits"


def version() -> str | None:
    name = interface()
    return None if name is None else installed(name, *INTERFACES[name])


def interface() -> str | None:
    """Name the module of the first FlashAttention-3 build that is installed."""
    return next((name for name in INTERFACES if findable(name)), None)


def settings() -> dict[str, str]:
    name = interface()
    if name is None:
        return {}
    if name not in sys.modules:
        return {"FA3 module": name, "FA3 num_splits argument": "not imported"}
    functions = _splitting(sys.modules[name])
    defaults = {
        1 if hasattr(function, "one_split") else inspect.signature(function).parameters[SPLITS].default
        for function in functions
    }
    return {
        "FA3 module": name,
        "FA3 num_splits argument": "accepted" if functions else "absent",
        "FA3 default num_splits": ", ".join(sorted(map(str, defaults))),
    }


def pin(contract: GpuContract) -> Undo:
    if (name := interface()) is None:
        raise PinError(f"FlashAttention-3: not installed; looked for {', '.join(INTERFACES)}")
    functions = _splitting(imported(name, "FlashAttention-3"))
    if not functions:
        raise PinError(f"FlashAttention-3: {name} has no function that takes {SPLITS}")
    unsplit = {function: _one_split(function) for function in functions}
    undo = functools.partial(replace_everywhere, {ours: theirs for theirs, ours in unsplit.items()})
    with undone_on_error(undo, "FlashAttention-3: its functions cannot be replaced"):
        replace_everywhere(unsplit)
    return undo


def probe(contract: GpuContract, shapes: Shapes) -> Iterator[Failure]:
    yield from attention_failures(contract.dtype, shapes, device(), library())


def library() -> ModuleType:
    """Import the FlashAttention-3 that is installed; raises NotSeenError where none is."""
    if (name := interface()) is None:
        raise NotSeenError("not seen: no FlashAttention-3 is installed")
    return import_module(name)


def _splitting(library: ModuleType) -> list[Callable]:
    """List the library's public functions that take `num_splits`."""
    public = (value for name, value in vars(library).items() if name[0] != "_")
    functions = filter(inspect.isfunction, public)
    return [function for function in functions if SPLITS in inspect.signature(function).parameters]


def _one_split(function: Callable) -> Callable:
    """Wrap a function so that it gets num_splits=1 whatever its caller passes."""
    place = list(inspect.signature(function).parameters).index(SPLITS)

    @functools.wraps(function)
    def unsplit(*args, **kwargs):
        if len(args) > place:
            return function(*args[:place], 1, *args[place + 1 :], **kwargs)
        return function(*args, **kwargs | {SPLITS: 1})

    unsplit.one_split = True  # type: ignore[attr-defined]
    return unsplit
