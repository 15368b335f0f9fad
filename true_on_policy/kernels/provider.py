"""What a GPU provider gives: a library whose own public functions make its kernels batch-invariant in this process.

A provider is a module of this package. Importing it imports no library that may be missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
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
    """See the module; `true_on_policy.kernels.gpu` pins several at once."""

    @property
    def NAME(self) -> str: ...

    def version(self) -> str | None:
        """Distribution and version that would be used, None where it is not installed. Imports nothing."""
        ...

    def settings(self) -> dict[str, str]:
        """What is in force now, read from getters, symbols and the dispatcher. Empty where it is not installed."""
        ...

    def pin(self, contract: GpuContract) -> Undo:
        """Switch the library's batch-invariant kernels on; call what it returns to restore what was found.

        Raises:
            PinError: not installed, another copy holds the operators, or the library did only a part. Nothing stays
                switched on then.
        """
        ...

    def probe(self, contract: GpuContract, shapes: Shapes) -> Iterator[Failure]:
        """Rows whose bits depend on their company at the shapes of a model; none where all is well.

        Raises:
            PinError: another kernel than the contract's serves one of the shapes.
            NotSeenError: no accelerator here, or the library is not installed.
        """
        ...


def device() -> torch.device:
    """The accelerator on which kernels are probed.

    Raises:
        NotSeenError: there is none.
    """
    if not torch.cuda.is_available():
        raise NotSeenError("not seen: no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def installed(module: str, *distributions: str) -> str | None:
    """Name and version of the distribution that `module` comes from, None where it cannot be imported.

    Args:
        module: its dotted name; it is looked for but not imported.
        distributions: names under which it is published, the likeliest first.
    """
    if not findable(module):
        return None
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{module} of unknown version"


def findable(module: str) -> bool:
    """Whether a module could be imported; unlike `find_spec` it does not import the packages around it."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or not parts:
        return spec is not None
    *folders, name = parts
    bases = [Path(base, *folders) for base in spec.submodule_search_locations or ()]
    return any((base / f"{name}.py").is_file() or (base / name).is_dir() for base in bases)
