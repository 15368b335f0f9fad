"""Look for each need in a host's source, and say which hooks work with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mis_plugins.hosts.checkout.module import Module, functions, handed_on, locals_of, member, parameters
from mis_plugins.hosts.checkout.tree import Folder, Tree
from mis_plugins.hosts.needs.record import Address, Need

FOLLOWED = 8  # imports from module to module


@dataclass(frozen=True)
class Place:
    """Where a definition stands."""

    module: Module
    node: ast.AST

    def __str__(self) -> str:
        return f"{self.module.path}:{getattr(self.node, 'lineno', 1)}"


@dataclass(frozen=True)
class Found:
    """What became of one need in a host's source.

    place: where an address of it answers; None where none does.
    tried: of each address before that, what is missing.
    """

    need: Need
    place: Place | None
    tried: Sequence[str]
    address: Address | None = None

    @property
    def moved(self) -> bool:
        """Whether it is answered at another address than the one that our own runs used."""
        return self.address is not None and self.address != self.need.addresses[self.need.ran]


def find(need: Need, tree: Tree) -> Found:
    """Try the addresses of a need, the newest first, as the hooks do."""
    tried: list[str] = []
    for address in need.addresses:
        place = _place(address, tree)
        lacks = f"{address}: not there" if place is None else _lacking(need, address, place.node)
        if lacks is None:
            return Found(need, place, tried, address)
        tried.append(lacks)
    return Found(need, None, tried)


def elsewhere(found: Found, folder: Folder) -> Found:
    """What hands a hook its arguments from a place that no address names: a host calls the hook by its flag."""
    need = found.need
    if found.place is not None or not need.hands:
        return found
    for module in folder.modules(need.addresses[0].module.partition(".")[0]):
        for node in functions(module.body):
            if handed_on(node) >= set(need.hands):
                address = Address(module.name, (node.name,))
                return replace(found, place=Place(module, node), address=address)
    return found


def find_all(needs: Any, tree: Tree) -> dict[str, Found]:
    """Each need of a host's table by its name there."""
    return {name: find(need, tree) for name, need in vars(needs).items()}


def hooks_of(found: Mapping[str, Found]) -> dict[str, list[Found]]:
    """The needs of each hook that has any."""
    hooks = dict.fromkeys(hook for one in found.values() for hook in one.need.hooks)
    return {hook: [one for one in found.values() if hook in one.need.hooks] for hook in hooks}


def _place(address: Address, tree: Tree) -> Place | None:
    first, *rest = address.names
    place = _defined(address.module, first, tree)
    if place is None or not rest:
        return place
    return next((found for owner in _classes(place, tree) for found in _members(owner, rest[0])), None)


def _defined(module: str, name: str, tree: Tree, left: int = FOLLOWED) -> Place | None:
    """The definition of a module's name, through imports of the host's own modules; an import where those end."""
    found = tree.module(module)
    node = None if found is None else found.names.get(name)
    if found is None or node is None:
        return None
    origin = found.imported_from(name) if left else None
    place = None if origin is None else _defined(*origin, tree, left - 1)
    if origin is not None and place is None and origin[0].partition(".")[0] == module.partition(".")[0]:
        return None  # an import of something that is gone
    return place or Place(found, node)


def _classes(place: Place, tree: Tree, left: int = FOLLOWED) -> Iterator[Place]:
    """A class, and the classes it inherits from."""
    if not isinstance(place.node, ast.ClassDef) or not left:
        return
    yield place
    for base in place.node.bases:
        if isinstance(base, ast.Name) and (above := _defined(place.module.name, base.id, tree)) is not None:
            yield from _classes(above, tree, left - 1)


def _members(owner: Place, name: str) -> Iterator[Place]:
    assert isinstance(owner.node, ast.ClassDef)
    node = member(owner.node, name)
    if node is not None:
        yield Place(owner.module, node)


def _lacking(need: Need, address: Address, node: ast.AST) -> str | None:
    """What a definition lacks that a hook gives, reads or is handed; None where it lacks nothing."""
    taken = parameters(node) if need.parameters else None
    lacks = {
        "parameter": [] if taken is None else [name for name in need.parameters if name not in taken],
        "variable": [name for name in need.holds if name not in locals_of(node)],
        "keyword": [name for name in need.hands if name not in handed_on(node)],
    }
    told = [f"no {kind} {', '.join(names)}" for kind, names in lacks.items() if names]
    return f"{address}: {'; '.join(told)}" if told else None
