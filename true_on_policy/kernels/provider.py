"""What a GPU provider gives: a library whose own public functions make its kernels batch-invariant in this process.

A provider is a module of this package. Importing it imports no library that may be missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from true_on_policy.contract import Shapes
from true_on_policy.errors import NotSeenError
from true_on_policy.probes import Failure

Undo = Callable[[], None]


class Agreed(Protocol):
    """What a provider reads of a GPU contract."""

    @property
    def backend(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def attention(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def trainer_gemm(self) -> str: ...
    @property
    def engine_gemm(self) -> str: ...


class Provider(Protocol):
    """See the module; `true_on_policy.kernels.gpu` pins several at once."""

    NAME: str

    def version(self) -> str | None:
        """Distribution and version that would be used, None where it is not installed. Imports nothing."""
        ...

    def settings(self) -> dict[str, str]:
        """What is in force now, read from getters, symbols and the dispatcher. Empty where it is not installed."""
        ...

    def pin(self, contract: Agreed) -> Undo:
        """Switch the library's batch-invariant kernels on; call what it returns to restore what was found.

        Raises:
            PinError: not installed, another copy holds the operators, or the library did only a part. Nothing stays
                switched on then.
        """
        ...

    def probe(self, contract: Agreed, shapes: Shapes) -> Iterator[Failure]:
        """Rows whose bits depend on their company at the shapes of a model; none where all is well.

        Raises:
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
        module: a top-level name, which is looked for but not imported.
        distributions: names under which it is published, the likeliest first.
    """
    if importlib.util.find_spec(module) is None:
        return None
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{module} of unknown version"
