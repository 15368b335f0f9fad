"""Pin the kernels of a contract in this process, prove that they hold, and restore what was found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import PinError, ProbeError
from true_on_policy.kernels import cpu, gpu
from true_on_policy.kernels.dispatcher import registration
from true_on_policy.kernels.probes import probe
from true_on_policy.kernels.provider import Undo


@runtime_checkable
class _Kernels(Protocol):
    """The kernels of one contract."""

    @property
    def name(self) -> str: ...

    def install(self) -> Undo: ...

    def observe(self) -> dict[str, str]:
        """What runs now, by the name of an operator or a setting."""
        ...

    def probe(self) -> None: ...


@dataclass(frozen=True)
class _Cpu:
    """Ours, on the CPU key of the dispatcher."""

    contract: Contract

    @property
    def name(self) -> str:
        return self.contract.backend

    def install(self) -> Undo:
        self._refuse_python_kernels()
        return cpu.install(cpu.BACKENDS[self.name])

    def observe(self) -> dict[str, str]:
        return {f"aten::{name}": registration(name, "CPU") for name in cpu.OPERATORS}

    def probe(self) -> None:
        probe(self.contract)

    def _refuse_python_kernels(self) -> None:
        """Python kernels on the CPU key are someone else's: Megatron-core's or SGLang's batch-invariant mode."""
        for name, kernel in self.observe().items():
            if ".py:" in kernel:
                raise PinError(f"{name} is overridden already ({kernel}); leave that mode before you pin")


@dataclass(frozen=True)
class _Gpu:
    """Those of other libraries, which refuse one another themselves."""

    contract: GpuContract

    @property
    def name(self) -> str:
        return gpu.name(self.contract)

    def install(self) -> Undo:
        return gpu.install(self.contract)

    def observe(self) -> dict[str, str]:
        return gpu.observe(self.contract)

    def probe(self) -> None:
        failure = next(gpu.failures(self.contract), None)
        if failure is not None:
            raise ProbeError(f"contract.backend: {self.contract.backend!r} does not hold: {failure}")


@dataclass
class _Active:
    """What is pinned in this process: what then ran, how to take it away, and how often it was asked for."""

    name: str
    kernels: dict[str, str]
    uninstall: Undo
    depth: int = 0


_lock = threading.RLock()
_active: _Active | None = None


@contextmanager
def pinned(contract: Contract | GpuContract) -> Iterator[None]:
    """Run the body on the kernels of `contract`; nests, and restores what it found even after an exception.

    A GpuContract pins in the trainer; an engine is pinned by its own flags and environment.

    Raises:
        PinError: another provider holds the operators, or a provider does not run here.
        ProbeError: a kernel gave a row other bits in a batch than alone; nothing stays pinned then.
        NotSeenError: the kernels of a GpuContract cannot be probed here; nothing stays pinned then.
    """
    _enter(contract)
    try:
        yield
    finally:
        _leave()


def pin(contract: Contract | GpuContract) -> None:
    """Pin `contract` for the rest of this process: for a host's init hook. The errors are those of `pinned`."""
    _enter(contract)


def active_backend() -> str | None:
    """Name of what is pinned now, the providers of a GpuContract joined by +; None where the stock kernels run."""
    return _active.name if _active else None


def _enter(contract: Contract | GpuContract) -> None:
    global _active
    kernels: _Kernels = _Gpu(contract) if isinstance(contract, GpuContract) else _Cpu(contract)
    with _lock:
        if _active is None:
            _active = _installed(kernels)
        elif _active.name != kernels.name:
            raise PinError(
                f"contract.backend: {kernels.name!r}, but {_active.name!r} is pinned in this process. "
                "Two backends have different bits: leave the outer pin first"
            )
        _active.depth += 1
        try:
            _refuse_replaced(_active.kernels, kernels.observe())
            kernels.probe()
        except BaseException:
            _leave()
            raise


def _installed(kernels: _Kernels) -> _Active:
    """Nothing stays where what then runs cannot be told."""
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


def _refuse_replaced(ours: dict[str, str], now: dict[str, str]) -> None:
    """A mode that was switched inside a pin took our kernels' place."""
    for name, kernel in now.items():
        if kernel != ours[name]:
            raise PinError(f"{name} was overridden inside a pin ({kernel}); leave that mode first")
