"""What one module of a host defines, read from its syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, Definition):
                yield from statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def functions(body: Sequence[ast.stmt]) -> Iterator[Function]:
    """Functions and methods of a module, those within others too."""
    for statement in body:
        yield from (node for node in ast.walk(statement) if isinstance(node, Function))


def bound(node: ast.stmt) -> Iterator[str]:
    """Names that one statement binds."""
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    else:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))


def member(owner: ast.ClassDef, name: str) -> ast.stmt | ast.Attribute | None:
    """The definition of a class's member, or the first `self.NAME = ...` in its methods; None where it has none."""
    defined = {one: node for node in statements(owner.body) for one in bound(node)}
    if name in defined:
        return defined[name]
    written = (node for node in ast.walk(owner) if isinstance(node, ast.Attribute))
    stored = (node for node in written if node.attr == name and isinstance(node.ctx, ast.Store))
    return next(
        (node for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"), None
    )


def parameters(node: ast.AST) -> set[str] | None:
    """Names of the parameters of a function, or of a class's `__init__`; None where any keyword is taken."""
    if isinstance(node, ast.ClassDef):
        init = member(node, "__init__")
        fields = {name for each in node.body if isinstance(each, ast.AnnAssign) for name in bound(each)}
        return fields if init is None else parameters(init)
    if not isinstance(node, Function) or node.args.kwarg is not None:
        return None
    return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def locals_of(node: ast.AST) -> set[str]:
    """Names that a function assigns."""
    return {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def handed_on(node: ast.AST) -> set[str]:
    """Keywords that a function hands on: of its calls, and text keys of its dicts."""
    keywords = {each.arg for each in ast.walk(node) if isinstance(each, ast.keyword) and each.arg}
    dicts = (key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys)
    return keywords | {
        key.value for key in dicts if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
