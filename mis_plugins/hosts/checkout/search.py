"""Read what the modules of a host's source define, and look for each need there: by syntax, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mis_plugins.hosts.needs import Address, Need

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Module:
    """The syntax of one file.

    path: of the file, within the host's source.
    name: the module's dotted path.
    body: its statements; none where Python cannot parse the file.
    """

    path: str
    name: str
    body: Sequence[ast.stmt]

    @classmethod
    def of(cls, source: bytes, path: str, name: str) -> Module:
        try:
            return cls(path, name, ast.parse(source).body)
        except (SyntaxError, ValueError, RecursionError):
            return cls(path, name, ())

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """The statement that binds each name of the module: a definition, an assignment, or an import."""
        return {name: node for node in statements(self.body) for name in bound(node)}

    def imported_from(self, name: str) -> tuple[str, str] | None:
        """The module and the name there from which this module imports a name; None where it does not."""
        node = self.names.get(name)
        if not isinstance(node, ast.ImportFrom):
            return None
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        is_package = self.path.endswith("__init__.py")
        above = self.name.split(".")[: len(self.name.split(".")) - node.level + is_package]
        parts = [*(above if node.level else ()), *([node.module] if node.module else ())]
        return ".".join(parts), original


Lookup = Callable[[str], Module | None]
"""The module of a dotted path; None where the host has no such file."""


@dataclass(frozen=True)
class Folder:
    """A checkout on disk."""

    root: Path
    _parsed: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """Parse a module once; None where there is no such file."""
        if name not in self._parsed:
            path = next((path for path in paths(name) if (self.root / path).is_file()), None)
            parsed = None if path is None else Module.of((self.root / path).read_bytes(), path, name)
            self._parsed[name] = parsed
        return self._parsed[name]

    def modules(self, package: str) -> Iterator[Module]:
        """Each module of a package."""
        for file in sorted((self.root / package).rglob("*.py")):
            name = ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")
            if (module := self.module(name)) is not None:
                yield module


def paths(module: str) -> tuple[str, str]:
    """The two files that a module may be."""
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, Definition):
                yield from statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def bound(node: ast.stmt) -> Iterator[str]:
    """Names that one statement binds."""
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    else:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def fields(owner: ast.ClassDef) -> set[str]:
    """Annotated names of a class."""
    return {name for each in owner.body if isinstance(each, ast.AnnAssign) for name in bound(each)}


def member(owner: ast.ClassDef, name: str) -> ast.stmt | ast.Attribute | None:
    """The definition of a class's member, or the first `self.NAME = ...` in its methods; None where it has none."""
    defined = {bound_name: node for node in statements(owner.body) for bound_name in bound(node)}
    if name in defined:
        return defined[name]
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return node
    return None


def parameters(node: ast.AST) -> set[str] | None:
    """Names of the parameters of a function, or of a class's `__init__`; None where any keyword is taken."""
    if isinstance(node, ast.ClassDef):
        init = member(node, "__init__")
        return fields(node) if init is None else parameters(init)
    if not isinstance(node, Function) or node.args.kwarg is not None:
        return None
    return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def locals_of(node: ast.AST) -> set[str]:
    """Names that a function assigns."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def handed_on(node: ast.AST) -> set[str]:
    """Keywords that a function hands on: of its calls, and text keys of its dicts."""
    keywords = {each.arg for each in ast.walk(node) if isinstance(each, ast.keyword) and each.arg}
    keys = (key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys)
    texts = (key.value for key in keys if isinstance(key, ast.Constant))
    return keywords | {text for text in texts if isinstance(text, str)}


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


def elsewhere(finding: Found, folder: Folder) -> Found:
    """What hands a hook its arguments from a place that no address names: a host calls the hook by its flag."""
    need = finding.need
    if finding.place is not None or not need.hands:
        return finding
    for module in folder.modules(need.addresses[0].module.partition(".")[0]):
        for node in (node for statement in module.body for node in ast.walk(statement)):
            if isinstance(node, Function) and handed_on(node) >= set(need.hands):
                return replace(finding, place=Place(module, node), address=Address(module.name, (node.name,)))
    return finding


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
    source = module_of(module)
    node = None if source is None else source.names.get(name)
    if source is None or node is None:
        return None
    origin = source.imported_from(name) if left else None
    place = None if origin is None else _defined(*origin, module_of, left - 1)
    if origin is not None and place is None and origin[0].partition(".")[0] == module.partition(".")[0]:
        return None  # an import of something that is gone
    return place or Place(source, node)


def _classes(place: Place, module_of: Lookup, left: int = FOLLOWED) -> Iterator[tuple[Module, ast.ClassDef]]:
    """A class, and the classes it inherits from, each with its module."""
    if not isinstance(place.node, ast.ClassDef) or not left:
        return
    yield place.module, place.node
    for base in place.node.bases:
        if isinstance(base, ast.Name) and (above := _defined(place.module.name, base.id, module_of)) is not None:
            yield from _classes(above, module_of, left - 1)


def _lacking(need: Need, address: Address, node: ast.AST) -> str | None:
    """What a definition lacks that a hook gives, reads or is handed; None where it lacks nothing."""
    taken = parameters(node)
    lacks = {
        "parameter": [] if taken is None else [name for name in need.parameters if name not in taken],
        "variable": [name for name in need.holds if name not in locals_of(node)],
        "keyword": [name for name in need.hands if name not in handed_on(node)],
    }
    phrases = [f"no {kind} {', '.join(names)}" for kind, names in lacks.items() if names]
    return f"{address}: {'; '.join(phrases)}" if phrases else None
