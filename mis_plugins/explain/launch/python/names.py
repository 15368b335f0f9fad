"""The names of a launcher, and what they hold."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from mis_plugins.explain.launch.python.values import Record, Shared, holds, lines_of, names_set, says, truth_of
from mis_plugins.explain.launch.reader import Reader, Reading, all_of, any_of, is_train
from mis_plugins.explain.launch.words import Text, hole, known, literal, shown


class Names(Reader, ast.NodeVisitor):
    """The values of a launcher as far as they are known; visiting a statement reads what it does."""

    def __init__(self, script: str, path: Path, reading: Reading, arguments: Sequence[str]):
        super().__init__(reading)
        self.path = path
        self.starts = [0, *accumulate(map(len, script.encode().splitlines(keepends=True)))]
        self.command = next((word for word in arguments[:1] if word[:1] != "-" and "=" not in word), None)
        self.options = arguments[bool(self.command) :]
        self.of_fields: dict[str, Any] | None = None  # what the command line sets, a command's own parameters aside
        self.handles: dict[int, Text] = {}  # files that are open to be written, each with its address
        self.globals: dict[str, Any] = {"__name__": literal("__main__")}
        self.frames = [self.globals]
        self.outside: dict[str, dict[str, Any]] = {}  # names that are `global` or `nonlocal`, and where they are
        self.enclosing: dict[ast.AST, list[dict[str, Any]]] = {}  # of each function within functions
        self.around: list[dict[str, Any]] = []
        self.defaults: dict[str, Any] = {}  # of parameters and fields by place, from where they were defined
        self.forks = self.round = 0
        self.tried: int | None = None  # forks around the try whose handlers would catch
        self.records: list[Record] = []
        self.alternatives: dict[int, tuple[Any, Any, Any]] = {}  # of two lists, dicts or records, each with its address
        self.hosts: set[str] = set()

    @property
    def locals(self) -> dict[str, Any]:
        return self.frames[-1]

    def scopes(self) -> list[dict[str, Any]]:
        return [self.defaults, *self.frames, *(record.fields for record in self.records)]

    def fork(self, label: str, then: Callable[[], object], otherwise: Callable[[], object]) -> None:
        with self.now(forks=self.forks + 1):
            super().fork(label, then, otherwise)

    def either(self, first: Any, second: Any, branch: str) -> Any:
        value = super().either(first, second, branch)
        if first is not second and (isinstance(first, Shared) or isinstance(second, Shared)):
            self.alternatives[id(value)] = value, first, second
        return value

    def visit(self, node: ast.AST) -> Any:
        self.reading.spend()
        return super().visit(node)

    def generic_visit(self, node: ast.AST) -> Any:
        """What has no rule of its own is not known, nor is a name that it sets."""
        self.forget(node)
        return self.unknown(node) if isinstance(node, ast.expr) else None

    def forget(self, *nodes: ast.AST) -> None:
        """The names that some parts set are not known."""
        for name in names_set(*nodes):
            self.store(name, hole(name))

    def unknown(self, node: ast.AST) -> Text:
        return hole(says(node), lines_of(node))

    def unread(self, node: ast.AST, why: str) -> None:
        self.reading.unread[lines_of(node)[0]] = f"{says(node)}: {why}"

    def store(self, name: str, value: Any) -> None:
        self.outside.get(name, self.locals)[name] = value

    def changed(self, before: Any, after: Any) -> None:
        """Give all names of a list, dict or record, which the launcher changes in place, its new value."""
        for item in before if isinstance(before, list) and not isinstance(after, list) else ():
            if isinstance(item, tuple) and is_train(known(item) or ""):
                self.reading.unread[item[0].lines[0]] = f"{shown(item)} in a list that changes: may be started too"
        for item in self.alternatives.pop(id(before), ())[1:]:
            self.changed(item, hole("a value that changes"))
        for scope in self.scopes():
            self.reading.spend(1 + len(scope))
            for name, value in scope.items():
                if value is before:
                    scope[name] = after
                elif holds(value, before):
                    scope[name] = hole("a value that changes")

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.store(target.id, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, self.unknown(target))
        elif isinstance(target, ast.Attribute):
            owner = self.visit(target.value)
            if isinstance(owner, Record):
                owner.fields[target.attr] = value
            else:
                self.changed(owner, self.unknown(target.value))
        elif isinstance(target, ast.Tuple | ast.List):
            has_rest = any(isinstance(part, ast.Starred) for part in target.elts)
            is_known = isinstance(value, list) and len(value) == len(target.elts) and not has_rest
            for index, part in enumerate(target.elts):
                self.assign(part, value[index] if is_known else self.unknown(target))
        elif isinstance(target, ast.Subscript):
            self.changed(self.visit(target.value), self.unknown(target))

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds; a part of it may decide where another is not known."""
        if isinstance(node, ast.BoolOp):
            decides, parts = isinstance(node.op, ast.Or), list[bool | None]()
            for part in node.values:
                may_not_run = None in parts
                parts.append(self.truth(part))
                if may_not_run:
                    self.forget(part)
                if parts[-1] is decides:
                    break
            return any_of(parts) if decides else all_of(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return None if truth is None else not truth
        return truth_of(self.visit(node))
