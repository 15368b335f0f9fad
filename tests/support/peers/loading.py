"""Loads one module of an installed peer: its real file, under its own dotted name.

A trainer's file imports rollout engines, data sets and clusters, gigabytes that the functions compared here never
touch. So the packages around it (`bare`) are entered without running their `__init__`, and what is not installed
(`absent`) is a stand-in while the file is being imported. Whoever uses one later gets an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EARLIER = Path(sys.prefix, "earlier")  # where scripts/peers.sh puts what peers-earlier.txt pins


@dataclass(frozen=True)
class Peer:
    """One module of a peer, and what it is imported without.

    earlier: whether the module is of a release in `peers-earlier.txt`, beside another release of the same package.
    """

    module: str
    bare: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    earlier: bool = False


class StandInError(RuntimeError):
    """A function that was compared did reach something that is not installed."""


class Anything:
    """Whatever an import needs of something that is not there: a base class, a decorator, an annotation."""

    importing = False

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getitem__(self, key: Any) -> Anything:
        self.check()
        return self

    __or__ = __ror__ = __getitem__

    def __iter__(self) -> Iterator:
        self.check()
        return iter(())

    def __bool__(self) -> bool:
        self.check()
        return False  # so that `if is_wandb_available(): import wandb` does not

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()

    def check(self) -> None:
        if not self.importing:
            raise StandInError("a stand-in was used after the import; take its module out of `absent`")


class AbsentModule(ModuleType):
    """A module of which every attribute is `Anything`."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages whose `__init__` shall not run, and the stand-ins."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.peer.bare:
            return ModuleSpec(fullname, self, is_package=True)
        return ModuleSpec(fullname, self, is_package=True) if is_under(fullname, self.peer.absent) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name not in self.peer.bare:
            return AbsentModule(spec.name)
        module = ModuleType(spec.name)
        module.__path__ = [str(Path(root, *spec.name.split("."))) for root in sys.path]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def is_under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


@contextmanager
def standing_in(peer: Peer) -> Iterator[None]:
    """Within, the absent modules are stand-ins; afterwards nobody else sees them."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if is_under(name, peer.absent)}
    finder = Finder(peer)
    sys.meta_path.insert(0, finder)
    Anything.importing = True
    try:
        yield
    finally:
        Anything.importing = False
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if is_under(name, peer.absent)]:
            del sys.modules[name]
        sys.modules.update(hidden)


@contextmanager
def of_earlier_release(peer: Peer) -> Iterator[None]:
    """Within, the peer's package is the earlier release; afterwards a test sees the one of peers.txt again.

    What was imported keeps the modules of its own release.
    """
    package = peer.module.partition(".")[0]
    ours = lambda: [name for name in sys.modules if is_under(name, (package,))]  # noqa: E731
    hidden = {name: sys.modules.pop(name) for name in ours()}
    sys.path.insert(0, str(EARLIER))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(EARLIER))
        for name in ours():
            del sys.modules[name]
        sys.modules.update(hidden)


def bare(kind: Any, **fields: Any) -> Any:
    """An instance of a peer's class that was never initialized, with what the methods read."""
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


def defaults(kind: Any) -> dict[str, Any]:
    """What a peer's config of this class sets where the user sets nothing."""
    return {field.name: field.default for field in dataclasses.fields(kind)}


@functools.cache
def load(peer: Peer) -> ModuleType:
    """The module, imported once. With CI=true it must import; elsewhere what needs it is skipped, with the reason.

    Raises:
        ImportError: in CI.
    """
    try:
        with of_earlier_release(peer) if peer.earlier else nullcontext(), standing_in(peer):
            return importlib.import_module(peer.module)
    except ImportError as error:
        if os.environ.get("CI", "").lower() == "true":
            raise
        pytest.skip(f"{peer.module} does not import: {error}")
