"""A GPU provider is a library whose own public functions make its kernels batch-invariant in this process.

Each provider is a module of this package. Importing the module imports no library that may be missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.errors import NotSeenError
from true_on_policy.kernels.probes import Failure

Undo = Callable[[], None]


@runtime_checkable
class Provider(Protocol):
    """A provider of kernels; `true_on_policy.kernels.gpu` pins the several providers of a contract."""

    @property
    def NAME(self) -> str: ...

    def version(self) -> str | None:
        """Name the distribution and version of the library without importing it; None where it is not installed."""
        ...

    def settings(self) -> dict[str, str]:
        """Read the settings in force from getters, symbols and the dispatcher; empty without the library."""
        ...

    def pin(self, contract: GpuContract) -> Undo:
        """Switch on the library's batch-invariant kernels, and return a function that undoes this exactly.

        Raises:
            PinError: the library is not installed, another copy holds the operators, or the library switched on only
                a part of them. Nothing stays switched on.
        """
        ...

    def probe(self, contract: GpuContract, shapes: Shapes) -> Iterator[Failure]:
        """Yield a failure for each row whose bits depend on the rows beside it, at the shapes of a model.

        Raises:
            PinError: another kernel than the contract's serves one of the shapes.
            NotSeenError: there is no accelerator here, or the library is not installed.
        """
        ...


def device() -> torch.device:
    """Return the accelerator on which kernels are probed.

    Raises:
        NotSeenError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NotSeenError("not seen: no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def installed(module: str, *distributions: str) -> str | None:
    """Return name and version of the distribution that `module` comes from; None where it cannot be imported.

    Args:
        module: the dotted name of the module, which is looked for but not imported.
        distributions: the names under which the module is published, the likeliest first.
    """
    if not findable(module):
        return None
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return f"{module} of unknown version"


def findable(module: str) -> bool:
    """Whether a module could be imported; unlike `find_spec`, this check imports no package around the module."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or not parts:
        return spec is not None
    *folders, name = parts
    bases = [Path(base, *folders) for base in spec.submodule_search_locations or ()]
    return any((base / f"{name}.py").is_file() or (base / name).is_dir() for base in bases)
