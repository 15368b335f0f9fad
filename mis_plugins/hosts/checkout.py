"""`python -m mis_plugins hosts check`: what of a host's source our hooks need, found or not.

The source is read by its syntax alone: nothing of it is imported or run.
"""

import argparse
import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts import arguments as recorded
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.needs import Address, Need
from mis_plugins.hosts.registry import every_host
from mis_plugins.shared.terminal import print_table

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
    def of(cls, source: bytes, path: str, name: str) -> "Module":
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


@dataclass(frozen=True)
class Folder:
    """A checkout on disk."""

    root: Path
    _parsed: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """The module of a dotted path, parsed once; None where the host has no such file."""
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
    """Statements of a body, also under `if`, `try` and `with`, less what only a checker of types reads."""
    for node in body:
        yield node
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for name in ("body", "orelse", "finalbody")[is_for_types:]:
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


def required(node: ast.AST) -> tuple[set[str], set[str]]:
    """Parameters without a default of a function or a class's `__init__`, `self` aside: by position, by keyword."""
    if isinstance(node, ast.ClassDef) and (init := member(node, "__init__")) is not None:
        return required(init)
    if not isinstance(node, Function):
        return set(), set()
    by_place, keywords = [*node.args.posonlyargs, *node.args.args], node.args.kwonlyargs
    bare = by_place[: len(by_place) - len(node.args.defaults)]
    pairs = zip(keywords, node.args.kw_defaults, strict=True)
    return {each.arg for each in bare} - {"self", "cls"}, {each.arg for each, default in pairs if default is None}


def locals_of(node: ast.AST) -> set[str]:
    """Names that a function assigns."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def handed_on(node: ast.AST, asked: Sequence[str]) -> set[Any]:
    """The keywords asked for that a function hands on together: in the one call or dict of it that has most of them."""
    calls = (each.keywords for each in ast.walk(node) if isinstance(each, ast.Call))
    keys = (each.keys for each in ast.walk(node) if isinstance(each, ast.Dict))
    groups = [{keyword.arg for keyword in call} for call in calls]
    groups += [{key.value for key in listed if isinstance(key, ast.Constant)} for listed in keys]
    return max((group & set(asked) for group in groups), key=len, default=set())


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


def find(need: Need, folder: Folder) -> Found:
    """Try the addresses of a need, the newest first, as the hooks do; then look for who calls a hook with arguments."""
    tried: list[str] = []
    for address in need.addresses:
        place = _place(address, folder)
        lacks = f"{address}: not there" if place is None else _lacking(need, address, place.node)
        if lacks is None:
            return Found(need, place, tried, address)
        tried.append(lacks)
    return _elsewhere(need, folder, tried) if need.hands else Found(need, None, tried)


def _elsewhere(need: Need, folder: Folder, tried: Sequence[str]) -> Found:
    """What hands a hook its arguments from a place that no address names: a host calls the hook by its flag."""
    for module in folder.modules(need.addresses[0].module.partition(".")[0]):
        for node in (node for statement in module.body for node in ast.walk(statement)):
            if isinstance(node, Function) and handed_on(node, need.hands) == set(need.hands):
                return Found(need, Place(module, node), tried, Address(module.name, (node.name,)))
    return Found(need, None, tried)


def _place(address: Address, folder: Folder) -> Place | None:
    first, *rest = address.names
    place = _defined(address.module, first, folder)
    if place is None or not rest:
        return place
    members = ((owner, member(node, rest[0])) for owner, node in _classes(place, folder))
    return next((Place(owner, node) for owner, node in members if node is not None), None)


def _defined(module: str, name: str, folder: Folder, left: int = FOLLOWED) -> Place | None:
    """The definition of a module's name, through imports of the host's own modules, up to the last import."""
    source = folder.module(module)
    node = None if source is None else source.names.get(name)
    if source is None or node is None:
        return None
    origin = source.imported_from(name) if left else None
    place = None if origin is None else _defined(*origin, folder, left - 1)
    if origin is not None and place is None and origin[0].partition(".")[0] == module.partition(".")[0]:
        return None  # an import of something that is gone
    return place or Place(source, node)


def _classes(place: Place, folder: Folder, left: int = FOLLOWED) -> Iterator[tuple[Module, ast.ClassDef]]:
    """A class, and the classes it inherits from, each with its module."""
    if not isinstance(place.node, ast.ClassDef) or not left:
        return
    yield place.module, place.node
    for base in place.node.bases:
        if isinstance(base, ast.Name) and (above := _defined(place.module.name, base.id, folder)) is not None:
            yield from _classes(above, folder, left - 1)


def _lacking(need: Need, address: Address, node: ast.AST) -> str | None:
    """What a definition lacks that a hook gives, reads or is handed; None where it lacks nothing."""
    taken = parameters(node)
    lacks = {
        "parameter": [] if taken is None else [name for name in need.parameters if name not in taken],
        "variable": [name for name in need.holds if name not in locals_of(node)],
        "keyword": [name for name in need.hands if name not in handed_on(node, need.hands)],
    }
    phrases = [f"no {kind} {', '.join(names)}" for kind, names in lacks.items() if names]
    phrases += [f"a new parameter {name}, which no hook of ours gives" for name in _new(need, node)]
    return f"{address}: {'; '.join(phrases)}" if phrases else None


def _new(need: Need, node: ast.AST) -> Sequence[str]:
    """The parameters without a default that a hook which calls the function leaves out."""
    by_place, by_keyword = required(node)
    harmful = {"none": by_place | by_keyword, "keywords": by_place, "all": set()}[need.unasked]
    return sorted(harmful.difference(need.parameters))


# ----------------------------------------------------------------------------------------------------- the command

GOOD, MOVED, FAILS = 0, 1, 2
SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(arguments: argparse.Namespace) -> int:
    """Check a checkout."""
    root = arguments.checkout
    hosts = by_package()
    host = next((host for package, host in hosts.items() if _is_root(root, package)), None)
    if host is None:
        lacks = f"no root of a checkout, which holds the package {' or '.join(hosts)}"
        raise InputError(lacks if root.is_dir() else "no such folder; give the root of a host's checkout")
    folder = Folder(root)
    findings = [find(need, folder) for need in vars(host.needs).values()]
    print(f"{host.title}: what our hooks need of it")
    print_table(("need", "where", "hooks"), [_row(finding) for finding in findings])
    print()
    hooks = dict.fromkeys(hook for finding in findings for hook in finding.need.hooks)
    print_table(("hook", "with this checkout"), [(hook, _state(hook, findings)) for hook in hooks])
    missing = _unknown_flags(host, folder) if host.records else {}
    for flag, place in missing.items():
        print(f"{flag}: given in {place}, and nothing in {host.package}/ defines it any more")
    if not SCRIPTS.is_dir():
        print("flags: not compared; our launch scripts are not installed, run the command in a checkout of ours")
    if missing or any(finding.place is None for finding in findings):
        return FAILS
    return MOVED if any(finding.moved for finding in findings) else GOOD


def _is_root(root: Path, package: str) -> bool:
    """Whether the package lies in this folder, and no checkout of its name, which holds the package."""
    return (root / package).is_dir() and not (root / package / package).is_dir()


def by_package() -> dict[str, Host]:
    """The first host of each package that has a table of needs."""
    first_hosts = dict[str, Host]()
    for host in every_host().values():
        if host.needs is not None:
            first_hosts.setdefault(host.package, host)
    return first_hosts


def _row(finding: Found) -> tuple[str, str, str]:
    where = f"MISSING: {'; '.join(finding.tried)}" if finding.place is None else str(finding.place)
    return finding.need.what, f"{where} (moved)" if finding.moved else where, ", ".join(finding.need.hooks)


def _state(hook: str, findings: Iterable[Found]) -> str:
    of_hook = [finding for finding in findings if hook in finding.need.hooks]
    missing = [finding.need.what for finding in of_hook if finding.place is None]
    if missing:
        return f"FAILS without {', '.join(missing)}"
    return "works, at a new address" if any(finding.moved for finding in of_hook) else "works"


def given_flags(host: Host) -> dict[str, str]:
    """Flags of the host's own parser that our scripts for it give, and the first place of each."""
    own, places = recorded.flags(host.records[0]), dict[str, str]()
    for script in sorted(SCRIPTS.glob("*.sh")):
        if ("slime" in script.name) != (host.package == "slime"):
            continue
        for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), 1):
            words = [] if line.lstrip().startswith("#") else line.split()
            for word in words:
                if word in own:
                    places.setdefault(word, f"scripts/{script.name}:{number}")
    return places


def _unknown_flags(host: Host, folder: Folder) -> dict[str, str]:
    """Flags that our scripts give and that nothing in the host's package defines any more."""
    defined = {flag for module in folder.modules(host.package) for flag in _flags(module)}
    return {flag: place for flag, place in given_flags(host).items() if flag not in defined}


def _flags(module: Module) -> Iterator[str]:
    """Texts that begin as flags do, and flags of the fields of classes, from which typed arguments are made."""
    for node in (node for statement in module.body for node in ast.walk(statement)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            yield node.value
        elif isinstance(node, ast.ClassDef):
            yield from (f"--{name.replace('_', '-')}" for name in fields(node))
