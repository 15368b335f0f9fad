"""What the GPU providers share: libraries whose own functions make their kernels batch-invariant in this process.

Each provider is a module of this package with a NAME. Importing the module imports no library that may be missing.

    version() -> str | None               distribution and version, without importing the library; None: not installed
    settings() -> dict[str, str]          the settings in force, from getters, symbols and the dispatcher
    pin(contract) -> Undo                 switches the kernels on, all or none; PinError where it cannot
    probe(contract, shapes) -> failures   each row whose bits depend on the rows beside it; PinError where another
                                          kernel serves a shape, NotSeenError without an accelerator or the library
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from true_on_policy.errors import NotSeenError

Undo = Callable[[], None]


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
