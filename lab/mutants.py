"""Mutants of a Python file: copies in which one expression or statement is replaced by a wrong one.

Annotations, docstrings, decorators, assertions and the texts of errors are left alone: no test should depend on them.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def _either_way(pairs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Each of a pair, with the other one in its place."""
    return {**pairs, **{after: before for before, after in pairs.items()}}


SWAPPED: dict[type[ast.AST], type[ast.AST]] = _either_way({
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
}) | {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}  # fmt: skip
RENAMED = _either_way({
    "min": "max",
    "amin": "amax",
    "minimum": "maximum",
    "any": "all",
    "exp": "expm1",
    "floor": "ceil",
})  # fmt: skip
LEFT_OUT = ("clamp", "detach", "float", "abs", "neg", "clone")
"""Methods whose call becomes its receiver."""

SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """One wrong program.

    place: dotted name of the function or class that holds the change; `module` outside of any.
    line: first line of what was replaced.
    changed: source before and after, and a number where several changes of a place are equal.
    operator: the kind of change, named by the node that is replaced.
    tree: the whole file with the change.
    """

    path: str
    place: str
    line: int
    changed: str
    operator: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """A name that outlives changes elsewhere in the file."""
        return f"{self.path} {self.place}: {self.changed}"

    @property
    def in_function(self) -> bool:
        """Whether the line runs when something is called, and not when the file is imported."""
        return _within_call(self.tree, self.line)


def mutants(source: str, name: str) -> list[Mutant]:
    """Return all mutants of a source text, in the order of its lines.

    Args:
        name: what the mutants call the file.
    """
    tree = ast.parse(source)
    met: Counter[str] = Counter()
    found = []
    for change in _changes(tree, ()):
        said = f"`{_short(change.before)}` -> `{_short(change.after)}`"
        place = ".".join(change.place) or "module"
        met[place + said] += 1
        number = f" ({met[place + said]})" if met[place + said] > 1 else ""
        operator = type(change.before).__name__
        line = change.before.lineno
        found.append(Mutant(name, place, line, said + number, operator, _replaced(tree, change)))
    return found


@dataclass(frozen=True)
class Change:
    """A node of a file, and its replacement in a mutant."""

    before: Any
    after: Any
    place: tuple[str, ...]


def _changes(node: ast.AST, place: tuple[str, ...]) -> Iterator[Change]:
    """Yield the changes of a node and of all nodes inside it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        place = (*place, node.name)
    if isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)) or _is_text(node):
        return
    for after in _instead(node):
        yield Change(node, after, place)
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, place)


def _is_text(node: ast.AST) -> bool:
    """Whether a node is a docstring, or a statement for the type checker alone."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _instead(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may replace a node in a mutant."""
    match node:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in SWAPPED:
            yield _with(node, op=SWAPPED[type(node.op)]())
        case ast.Compare() if type(node.ops[0]) in SWAPPED:
            yield _with(node, ops=[SWAPPED[type(node.ops[0])](), *node.ops[1:]])
        case ast.UnaryOp():
            yield node.operand
        case ast.IfExp():
            yield _with(node, body=node.orelse, orelse=node.body)
        case ast.If():
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.Constant():
            yield from _constants(node)
        case ast.Call():
            yield from _calls(node)
        case ast.Expr() | ast.Raise():
            yield ast.Pass()
        case ast.Return() if node.value is not None:
            yield from _returns(node)


def _constants(node: ast.Constant) -> Iterator[ast.AST]:
    if isinstance(node.value, bool):
        yield _with(node, value=not node.value)
    elif isinstance(node.value, (int, float)):
        yield _with(node, value=node.value + 1)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    """Yield a call of the opposite function, a `where` with exchanged branches, or the receiver alone."""
    if not isinstance(node.func, ast.Attribute):
        return
    name = node.func.attr
    if name in RENAMED:
        yield _with(node, func=_with(node.func, attr=RENAMED[name]))
    if name == "where" and len(node.args) == 3:
        condition, one, other = node.args
        yield _with(node, args=[condition, other, one])
    if name in LEFT_OUT:
        receiver = node.func.value
        is_module = isinstance(receiver, ast.Name) and receiver.id == "torch"
        yield node.args[0] if is_module else receiver


def _returns(node: ast.Return) -> Iterator[ast.AST]:
    """Yield a return of None in place of a name, an attribute or a call; other values have changes inside."""
    if isinstance(node.value, (ast.Name, ast.Attribute, ast.Call)):
        yield _with(node, value=ast.Constant(None))


def _with(node: ast.AST, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _replaced(tree: ast.Module, change: Change) -> ast.Module:
    """Return a copy of the tree with one node replaced; unchanged subtrees are shared."""

    def copied(node: Any) -> Any:
        if node is change.before:
            return ast.fix_missing_locations(ast.copy_location(change.after, change.before))
        if isinstance(node, list):
            inside = [copied(one) for one in node]
            return inside if any(new is not old for new, old in zip(inside, node, strict=True)) else node
        if not isinstance(node, ast.AST):
            return node
        fields = {name: copied(value) for name, value in ast.iter_fields(node)}
        changed = {name: value for name, value in fields.items() if value is not getattr(node, name)}
        return _with(node, **changed) if changed else node

    return copied(tree)


def _short(node: ast.AST) -> str:
    """Return the first line of a node's source, cut to 90 characters."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]
    return text if len(text) <= 90 else text[:87] + "..."


def _within_call(tree: ast.Module, line: int) -> bool:
    """Whether a function or lambda of the file holds the line in its body."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            body = node.body if isinstance(node.body, list) else [node.body]
            if body[0].lineno <= line <= (body[-1].end_lineno or line):
                return True
    return False
