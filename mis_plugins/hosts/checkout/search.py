"""Look for each need in a host's source, and say which hooks work with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mis_plugins.hosts.checkout.source import (
    Folder,
    Function,
    Lookup,
    Module,
    handed_on,
    locals_of,
    member,
    parameters,
)
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


def find(need: Need, module_of: Lookup) -> Found:
    """Try the addresses of a need, the newest first, as the hooks do."""
    tried: list[str] = []
    for address in need.addresses:
        place = _place(address, module_of)
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
        for node in (node for statement in module.body for node in ast.walk(statement)):
            if isinstance(node, Function) and handed_on(node) >= set(need.hands):
                return replace(found, place=Place(module, node), address=Address(module.name, (node.name,)))
    return found


def find_all(needs: Any, module_of: Lookup) -> dict[str, Found]:
    """Each need of a host's table by its name there."""
    return {name: find(need, module_of) for name, need in vars(needs).items()}


def _place(address: Address, module_of: Lookup) -> Place | None:
    first, *rest = address.names
    place = _defined(address.module, first, module_of)
    if place is None or not rest:
        return place
    members = ((owner, member(node, rest[0])) for owner, node in _classes(place, module_of))
    return next((Place(owner, node) for owner, node in members if node is not None), None)


def _defined(module: str, name: str, module_of: Lookup, left: int = FOLLOWED) -> Place | None:
    """The definition of a module's name, through imports of the host's own modules; an import where those end."""
    found = module_of(module)
    node = None if found is None else found.names.get(name)
    if found is None or node is None:
        return None
    origin = found.imported_from(name) if left else None
    place = None if origin is None else _defined(*origin, module_of, left - 1)
    if origin is not None and place is None and origin[0].partition(".")[0] == module.partition(".")[0]:
        return None  # an import of something that is gone
    return place or Place(found, node)


def _classes(place: Place, module_of: Lookup, left: int = FOLLOWED) -> Iterator[tuple[Module, ast.ClassDef]]:
    """A class, and the classes it inherits from, each with its module."""
    if not isinstance(place.node, ast.ClassDef) or not left:
        return
    yield place.module, place.node
    for base in place.node.bases:
        if (
            isinstance(base, ast.Name)
            and (above := _defined(place.module.name, base.id, module_of)) is not None
        ):
            yield from _classes(above, module_of, left - 1)


def _lacking(need: Need, address: Address, node: ast.AST) -> str | None:
    """What a definition lacks that a hook gives, reads or is handed; None where it lacks nothing."""
    taken = parameters(node)
    lacks = {
        "parameter": [] if taken is None else [name for name in need.parameters if name not in taken],
        "variable": [name for name in need.holds if name not in locals_of(node)],
        "keyword": [name for name in need.hands if name not in handed_on(node)],
    }
    told = [f"no {kind} {', '.join(names)}" for kind, names in lacks.items() if names]
    return f"{address}: {'; '.join(told)}" if told else None
