"""Pin the kernels of a contract in this process, prove that they hold, and restore what was found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from true_on_policy.contract import Contract
from true_on_policy.errors import PinError
from true_on_policy.kernels import cpu
from true_on_policy.probes import probe


@dataclass
class _Active:
    """The one provider of this process: what it installed, how to take it away, and how often it was asked for."""

    backend: str
    kernels: dict[str, str]
    uninstall: cpu.Uninstall
    depth: int = 0


_lock = threading.RLock()
_active: _Active | None = None


@contextmanager
def pinned(contract: Contract) -> Iterator[None]:
    """Run the body on the kernels of `contract`; nests, and restores what it found even after an exception.

    Raises:
        PinError: another provider holds the operators, or the backend does not run here.
        ProbeError: a kernel gave a row other bits in a batch than alone; nothing stays pinned then.
    """
    _enter(contract)
    try:
        yield
    finally:
        _leave()


def pin(contract: Contract) -> None:
    """Pin `contract` for the rest of this process: for a host's init hook. The errors are those of `pinned`."""
    _enter(contract)


def active_backend() -> str | None:
    """Name of the backend that is pinned now, None where the stock kernels run."""
    return _active.backend if _active else None


def _enter(contract: Contract) -> None:
    global _active
    with _lock:
        if _active is None:
            _refuse_python_kernels()
            backend = cpu.BACKENDS[contract.backend]
            uninstall = cpu.install(backend)
            _active = _Active(backend.name, _cpu_kernels(), uninstall)
        elif _active.backend != contract.backend:
            raise PinError(
                f"contract.backend: {contract.backend!r}, but {_active.backend!r} is pinned in this process. "
                "Two backends have different bits: leave the outer pin first"
            )
        _active.depth += 1
        try:
            _refuse_replaced_kernels(_active.kernels)
            probe(contract)
        except BaseException:
            _leave()
            raise


def _leave() -> None:
    global _active
    with _lock:
        assert _active is not None, "left a pin that was never entered"
        _active.depth -= 1
        if _active.depth == 0:
            _active.uninstall()
            _active = None


def _refuse_python_kernels() -> None:
    """Python kernels on the CPU key are someone else's: Megatron-core's or SGLang's batch-invariant mode."""
    for name, kernel in _cpu_kernels().items():
        if ".py:" in kernel:
            raise PinError(f"aten::{name} is overridden already ({kernel}); leave that mode before you pin")


def _refuse_replaced_kernels(ours: dict[str, str]) -> None:
    """A mode that was switched on inside a pin took our kernels' place."""
    for name, kernel in _cpu_kernels().items():
        if kernel != ours[name]:
            raise PinError(f"aten::{name} was overridden inside a pin ({kernel}); leave that mode first")


def _cpu_kernels() -> dict[str, str]:
    """What the dispatcher runs on CPU for each operator, in its own words."""
    return {name: _cpu_kernel(name) for name in cpu.OPERATORS}


def _cpu_kernel(name: str) -> str:
    lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
    return next((line for line in lines if line.startswith("CPU:")), "")
