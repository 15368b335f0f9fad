"""Expressions of a launcher, but for calls."""

import ast
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from mis_plugins.explain.launch.python import names
from mis_plugins.explain.launch.python.names import PLAIN, Names, as_text, equal, key_of, lines_of, says, truth_of
from mis_plugins.explain.launch.reader import any_of
from mis_plugins.explain.launch.words import Piece, Text, known, literal

LOOPS = 1000  # rounds of one loop
LARGEST = 2**63  # of a number; a power would fill the memory


class Expressions(Names):
    """The values of expressions."""

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):
            return self.reading.paid(literal(node.value, lines_of(node)))
        return node.value if isinstance(node.value, PLAIN) else self.unknown(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Text:
        return self.reading.paid(tuple(piece for part in node.values for piece in as_text(self.visit(part))))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Text:
        value = self.visit(node.value)
        is_plain = node.format_spec is None and node.conversion == -1
        return as_text(value, lines_of(node)) if is_plain else self.unknown(node.value)

    def visit_Name(self, node: ast.Name) -> Any:
        for scope in (self.outside.get(node.id, self.locals), *reversed(self.around), self.globals):
            if node.id in scope:
                return scope[node.id]
        return self.unknown(node)

    def visit_Await(self, node: ast.Await) -> Any:
        return self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        value = self.visit(node.value)
        self.assign(node.target, value)
        return value

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        truth = self.truth(node.test)
        if truth is None:
            return self.either(self.visit(node.body), self.visit(node.orelse), says(node.test))
        return self.visit(node.body if truth else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        decides, is_sure = isinstance(node.op, ast.Or), True
        value: Any = None
        for part in node.values:
            value = self.visit(part)
            if not is_sure:  # the part may not run
                self.forget(part)
            truth = truth_of(value)
            is_sure = is_sure and truth is not None
            if truth is decides:
                break
        return value if is_sure else self.unknown(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return self.unknown(node) if truth is None else not truth
        value = self.visit(node.operand)
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else self.unknown(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        left, kind, right = self.visit(node.left), node.ops[0], self.visit(node.comparators[0])
        holds: bool | None = None
        if isinstance(kind, ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
            holds = equal(left, right)
        elif isinstance(kind, ast.In | ast.NotIn) and isinstance(right, list | dict):
            holds = any_of([equal(left, literal(key) if isinstance(key, str) else key) for key in right])
        if holds is None or len(node.ops) > 1:
            return self.unknown(node)
        return holds != isinstance(kind, ast.NotEq | ast.IsNot | ast.NotIn)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        return self.operate(node, self.visit(node.left), node.op, self.visit(node.right))

    def operate(self, node: ast.AST, left: Any, kind: ast.operator, right: Any) -> Any:
        """Texts and lists are added, paths divided and whole numbers multiplied; any other value is not known."""
        if isinstance(kind, ast.Div) and isinstance(left, tuple) and isinstance(right, tuple):
            return self.divided(node, left, right)
        adds = isinstance(kind, ast.Add)
        if isinstance(left, list) and isinstance(right, list) and adds:
            self.reading.spend(len(left) + len(right))
            return left + right
        if isinstance(left, list) or isinstance(right, list):
            return self.unknown(node)
        if adds and (isinstance(left, tuple) or isinstance(right, tuple)):
            return self.reading.paid((*as_text(left), *as_text(right)))
        if isinstance(kind, ast.Mult) and isinstance(left, int) and isinstance(right, int):
            return left * right if abs(left * right) < LARGEST else self.unknown(node)
        return self.unknown(node)

    def divided(self, node: ast.AST, left: Text, right: Text) -> Text:
        """Two parts of a path."""
        folder, more = known(left), known(right)
        if folder is not None and more is not None:
            return self.reading.paid(literal(str(PurePosixPath(folder) / more), lines_of(node)))
        may_replace = right[:1] and (right[0].text or "")[:1] in "/."  # all before it, or nothing
        return self.unknown(node) if may_replace else self.reading.paid((*left, Piece("/"), *right))

    def visit_List(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        values, is_sure = self.items(node.elts)
        return values if is_sure else self.unknown(node)

    visit_Tuple = visit_Set = visit_List

    def items(self, nodes: Sequence[ast.expr]) -> tuple[list[Any], bool]:
        """The values of expressions up to a `*` whose items are not known, and whether that is all."""
        values, is_sure = list[Any](), True
        for node in nodes:
            value = self.visit(node.value if isinstance(node, ast.Starred) else node)
            is_sure = is_sure and (not isinstance(node, ast.Starred) or isinstance(value, list))
            if is_sure:
                values += value if isinstance(node, ast.Starred) else [value]
        return values, is_sure

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        first, *more = node.generators
        values, items = self.visit(first.iter), []
        if more or first.ifs or not isinstance(values, list) or len(values) > LOOPS:
            return self.unknown(node)
        targets = names.names_set(first.target)
        before = {name: self.locals[name] for name in targets if name in self.locals}
        for value in values:
            self.assign(first.target, value)
            items.append(self.visit(node.elt))
        for name in targets:
            self.locals.pop(name, None)
        self.locals.update(before)
        return items

    visit_GeneratorExp = visit_ListComp

    def visit_Dict(self, node: ast.Dict) -> Any:
        keys = [None if key is None else key_of(self.visit(key)) for key in node.keys]
        values = [self.visit(value) for value in node.values]
        return self.unknown(node) if None in keys else dict(zip(keys, values, strict=True))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        owner, key = self.visit(node.value), key_of(self.visit(node.slice))
        if isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        return owner[key] if isinstance(owner, dict) and key in owner else self.unknown(node)
