"""Pin the kernels of a contract in this process, probe them, and restore the previous kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import PinError
from true_on_policy.kernels import cpu, gpu, native
from true_on_policy.kernels.mode import registration
from true_on_policy.kernels.probes import probe
from true_on_policy.kernels.provider import Undo


@dataclass(frozen=True)
class _Kernels:
    """The kernels of a contract: of this package on the CPU key, or of other libraries on an accelerator."""

    name: str
    install: Callable[[], Undo]
    observe: Callable[[], dict[str, str]]  # the kernel or setting in force now, by its name
    probe: Callable[[], None]


def _kernels(contract: Contract | GpuContract) -> _Kernels:
    if isinstance(contract, GpuContract):
        name, install = gpu.name(contract), partial(gpu.install, contract)
        return _Kernels(name, install, partial(gpu.observe, contract), partial(gpu.probe, contract))
    return _Kernels(native.NAME, _install, _observe, lambda: probe(contract))


def _install() -> Undo:
    for name, kernel in _observe().items():
        if ".py:" in kernel:  # another library's batch-invariant mode put it there
            raise PinError(f"{name} is overridden already ({kernel}); leave that mode before you pin")
    return cpu.install()


def _observe() -> dict[str, str]:
    return {f"aten::{name}": registration(name, "CPU") for name in cpu.OPERATORS}


@dataclass
class _Active:
    """The pin of this process: the kernels it put in place, how to remove them, and how many pins are nested."""

    name: str
    kernels: dict[str, str]
    uninstall: Undo
    depth: int = 0


_lock = threading.RLock()
_active: _Active | None = None


@contextmanager
def pinned(contract: Contract | GpuContract) -> Iterator[None]:
    """Run the body on the kernels of `contract`. Pins nest; an exception restores the previous kernels too.

    A GpuContract pins in the trainer; an engine is pinned by its own flags and environment.

    Raises:
        PinError: another provider holds the operators, or a provider does not run here.
        ProbeError: a kernel gave a row other bits in a batch than alone. Nothing stays pinned.
        NotSeenError: the kernels of a GpuContract cannot be probed here. Nothing stays pinned.
    """
    pin(contract)
    try:
        yield
    finally:
        _leave()


def active_backend() -> str | None:
    """Name the kernels that are pinned now, a GpuContract's providers joined by +; None where nothing is pinned."""
    return _active.name if _active else None


def pin(contract: Contract | GpuContract) -> None:
    """Pin `contract` for the rest of this process, for a host's init hook; raises the errors of `pinned`."""
    global _active
    kernels = _kernels(contract)
    with _lock:
        if _active is None:
            _active = _installed(kernels)
        elif _active.name != kernels.name:
            raise PinError(
                f"kernels: {kernels.name!r}, but {_active.name!r} is pinned in this process. "
                "Other kernels have other bits: leave the outer pin first"
            )
        _active.depth += 1
        try:
            for name, kernel in kernels.observe().items():
                if kernel != _active.kernels[name]:
                    raise PinError(f"{name} was overridden inside a pin ({kernel}); leave that mode first")
            kernels.probe()
        except BaseException:
            _leave()
            raise


def _installed(kernels: _Kernels) -> _Active:
    """Install the kernels and note which kernels run; uninstall them where this cannot be read."""
    uninstall = kernels.install()
    try:
        return _Active(kernels.name, kernels.observe(), uninstall)
    except BaseException:
        uninstall()
        raise


def _leave() -> None:
    global _active
    with _lock:
        assert _active is not None, "left a pin that was never entered"
        _active.depth -= 1
        if _active.depth == 0:
            uninstall, _active = _active.uninstall, None
            uninstall()
