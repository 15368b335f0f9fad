"""Pin the kernels of a contract in this process, probe them, and restore the previous kernels."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import PinError
from true_on_policy.kernels import cpu, gpu
from true_on_policy.kernels.provider import Undo

KERNELS: dict[type, ModuleType] = {Contract: cpu, GpuContract: gpu}


@dataclass
class _Active:
    """The pin of this process: the kernels it put in place, how to remove them, and how many pins are nested."""

    name: str
    kernels: dict[str, str]  # the kernel or setting in force, by its name
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
    kernels = KERNELS[type(contract)]
    name = kernels.name(contract)
    with _lock:
        if _active is None:
            with ExitStack() as installed:  # uninstalls where what runs cannot be read
                installed.callback(kernels.install(contract))
                _active = _Active(name, kernels.observe(contract), installed.pop_all().close)
        elif _active.name != name:
            raise PinError(
                f"kernels: {name!r}, but {_active.name!r} is pinned in this process. "
                "Other kernels have other bits: leave the outer pin first"
            )
        _active.depth += 1
        try:
            for setting, kernel in kernels.observe(contract).items():
                if kernel != _active.kernels[setting]:
                    raise PinError(f"{setting} was overridden inside a pin ({kernel}); leave that mode first")
            kernels.probe(contract)
        except BaseException:
            _leave()
            raise


def _leave() -> None:
    global _active
    with _lock:
        assert _active is not None, "left a pin that was never entered"
        _active.depth -= 1
        if _active.depth == 0:
            uninstall, _active = _active.uninstall, None
            uninstall()
