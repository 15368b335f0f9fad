"""What the GPU providers share: libraries whose own functions make their kernels batch-invariant in this process.

Each provider is a module of this package with a NAME. Importing the module imports no library that may be missing.

    version() -> str | None               distribution and version, without importing the library; None: not installed
    settings() -> dict[str, str]          the settings in force, from getters, symbols and the dispatcher
    pin(contract) -> Undo                 switches the kernels on, all or none; PinError where it cannot
    probe(contract, shapes) -> failures   each row whose bits depend on the rows beside it; PinError where another
                                          kernel serves a shape, NotSeenError without an accelerator or the library
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mis_plugins.shared import provenance
from true_on_policy.errors import NotSeenError, PinError

Undo = Callable[[], None]


def device() -> torch.device:
    """Return the accelerator on which kernels are probed; raises NotSeenError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise NotSeenError("not seen: no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def installed(module: str, *distributions: str) -> str | None:
    """Return name and version of the distribution that `module` comes from; None where it cannot be imported.

    `module` is looked for but not imported; of the names under which it is published, the likeliest comes first.
    """
    if not findable(module):
        return None
    versions = ((name, provenance.installed(name)) for name in distributions)
    return next((f"{name} {version}" for name, version in versions if version), f"{module} of unknown version")


def findable(module: str) -> bool:
    """Whether a module could be imported; unlike `find_spec`, this check imports no package around the module."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or not parts:
        return spec is not None
    *folders, name = parts
    bases = [Path(base, *folders) for base in spec.submodule_search_locations or ()]
    return any((base / f"{name}.py").is_file() or (base / name).is_dir() for base in bases)


def imported(module: str, library: str) -> ModuleType:
    """Import a module of a library that is pinned; raises PinError where it cannot be imported."""
    try:
        return import_module(module)
    except Exception as error:
        raise PinError(f"{library}: {module} cannot be imported ({error})") from error


@contextmanager
def undone_on_error(undo: Undo, what: str) -> Iterator[None]:
    """Undo where an exception or Ctrl-C ends the block; an exception becomes a PinError that begins with `what`."""
    try:
        yield
    except BaseException as error:
        undo()
        if isinstance(error, Exception):
            raise PinError(f"{what} ({error})") from error
        raise


# Functions are replaced under every name by which modules hold them, and put back.

MISSING = object()


@dataclass(frozen=True)
class Held:
    """The value that a module or a class holds under a name; MISSING where the name is inherited or unknown."""

    owner: Any
    name: str
    value: Any

    def put_back(self) -> None:
        if self.value is MISSING:
            if self.name in vars(self.owner):
                delattr(self.owner, self.name)
        elif vars(self.owner).get(self.name) is not self.value:
            setattr(self.owner, self.name, self.value)


def held(owner: Any, name: str) -> Held:
    """Note what a module or a class itself holds under a name; what it inherits is MISSING."""
    return Held(owner, name, vars(owner).get(name, MISSING))


def held_by(packages: Iterable[str]) -> list[Held]:
    """List every function and class that the imported modules of these packages hold."""
    roots = tuple(packages)
    return [
        Held(module, name, value)
        for dotted, module in list(sys.modules.items())
        if any(dotted == root or dotted.startswith(f"{root}.") for root in roots)
        for name, value in list(getattr(module, "__dict__", {}).items())
        if callable(value)
    ]


def replace_everywhere(replacements: Mapping[Callable, Callable]) -> None:
    """Replace each function by its replacement in every imported module, under whatever name a module holds it.

    A function that an instance, class, closure or table holds is out of reach.
    """
    by_identity = {id(function): other for function, other in replacements.items()}
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        for name, value in list(namespace.items()):
            if id(value) in by_identity:
                namespace[name] = by_identity[id(value)]


@contextmanager
def counted(owner: Any, name: str, note: Callable[[], Any] = lambda: None) -> Iterator[list[Any]]:
    """Count the calls of a function: the yielded list grows by the result of `note` before each call."""
    calls, function, original = [], getattr(owner, name), held(owner, name)

    def counting(*args, **kwargs):
        calls.append(note())
        return function(*args, **kwargs)

    setattr(owner, name, counting)
    try:
        yield calls
    finally:
        original.put_back()
