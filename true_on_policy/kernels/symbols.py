"""Replace functions under every name by which modules hold them, and put the functions back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


def put_back(found: Iterable[Held]) -> None:
    for one in found:
        one.put_back()


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
    found, calls = held(owner, name), []
    function = getattr(owner, name)

    def counting(*args, **kwargs):
        calls.append(note())
        return function(*args, **kwargs)

    setattr(owner, name, counting)
    try:
        yield calls
    finally:
        found.put_back()
