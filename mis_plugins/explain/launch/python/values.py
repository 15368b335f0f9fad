"""The values of a launcher's names and of its expressions, but for calls.

A value is a `Text`, a number, a bool, None, a list, a dict, a `Record`, or the node of a function or class of the
launcher. A value that only running the launcher would tell is a text with a piece that is not known.
"""

import ast
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from mis_plugins.explain.launch.reader import PACKAGES, Ended, Reader, Reading, all_of, any_of, is_train
from mis_plugins.explain.launch.words import Lines, Piece, Text, hole, known, literal, shown

PLAIN = bool | int | float | None
TELLS = ("print", "debug", "info", "warning")  # functions that show a command, and start nothing
# Functions that change nothing that they are given, and those of them that may give back a part of it.
GIVE_PARTS = re.compile(r"list|tuple|(frozen)?set|dict|sorted|reversed|enumerate|zip|iter|next|min|max|filter|map|"
                        r"copy\.copy|(dataclasses|itertools)\.\w+")  # fmt: skip
LEAVES_GIVEN = re.compile(rf"({'|'.join(sorted(PACKAGES))}|os|subprocess|shlex|json|yaml|pprint)\.[\w.]+|"
                          r"len|str|repr|int|float|bool|sum|any|all|isinstance|type|hasattr|format|range|open|copy\.deepcopy|"
                          rf"(pathlib\.)?Path|(.*\.)?({'|'.join(TELLS)})|{GIVE_PARTS.pattern}")  # fmt: skip
LOOPS = 1000  # rounds of one loop
LARGEST = 2**63  # of a number; a power would fill the memory


class Raised(Ended):
    """A statement raises an exception."""


class Round(Exception):
    """A round of a loop ends, and with `break` the loop."""

    def __init__(self, breaks: bool):
        self.breaks = breaks


@dataclass(eq=False)
class Record:
    """An object of a class of the launcher."""

    fields: dict[str, Any]
    node: ast.ClassDef


Shared = list | dict | Record  # what several names may hold


class Values(Reader, ast.NodeVisitor):
    """The values of a launcher as far as they are known; visiting a statement reads what it does."""

    def __init__(self, script: str, path: Path, reading: Reading, arguments: Sequence[str]):
        super().__init__(reading)
        self.path, self.folder = path, ""
        lines = script.encode().splitlines(keepends=True)
        self.starts = [3 * script.startswith("\ufeff"), *accumulate(map(len, lines))]
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
        self.kept: list[dict[str, Any]] = []  # fields of records, and the names of functions around functions
        self.alternatives: dict[int, tuple[Any, Any, Any]] = {}  # of two lists, dicts or records, each with its address
        self.hosts: set[str] = set()
        self.called: set[ast.arguments] = set()  # of the functions that were read
        self.running: set[ast.arguments] = set()  # of those that call what is read
        self.handing = ""  # the call that hands on what is lost

    @property
    def locals(self) -> dict[str, Any]:
        return self.frames[-1]

    def working_folder(self) -> str:
        return self.folder

    def scopes(self) -> list[dict[str, Any]]:
        own = [self.defaults, *self.frames]
        ids = set(map(id, own))
        return [*own, *(scope for scope in self.kept if id(scope) not in ids)]

    def fork(self, label: str, then: Callable[[], object], otherwise: Callable[[], object]) -> None:
        with self.now(forks=self.forks + 1):
            super().fork(label, then, otherwise)

    def either(self, first: Any, second: Any, branch: str) -> Any:
        value = super().either(first, second, branch)
        if first is not second and (isinstance(first, Shared) or isinstance(second, Shared)):
            self.alternatives[id(value)] = value, first, second
        return value

    def is_shared(self, value: Any) -> bool:
        """Whether a value is one that several names may hold, and that changes for all of them."""
        return isinstance(value, Shared) or id(value) in self.alternatives

    def visit(self, node: ast.AST) -> Any:
        self.reading.spend()
        return super().visit(node)

    def generic_visit(self, node: ast.AST) -> Any:
        """What has no rule of its own is not known, nor is a name that it sets."""
        self.forget(node)
        parts = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        self.lose(*map(self.visit, () if hasattr(node, "generators") else parts))
        self.lose_within(node)
        return self.unknown(node) if isinstance(node, ast.expr) else None

    def forget(self, *nodes: ast.AST) -> None:
        """The names that some parts set are not known."""
        for name in names_set(*nodes):
            self.store(name, hole(name))

    def unknown(self, node: ast.AST, *values: Any) -> Text:
        """A value that is not known; nor are lists, dicts and records from then on that it may be or hold."""
        self.lose(*values)
        return hole(says(node), lines_of(node))

    def unread(self, node: ast.AST, why: str) -> None:
        self.reading.unread[lines_of(node)[0]] = f"{says(node)}: {why}"

    def store(self, name: str, value: Any) -> None:
        self.outside.get(name, self.locals)[name] = value

    def changed(self, before: Any, after: Any) -> None:
        """Give all names of a list, dict or record, which the launcher changes in place, its new value."""
        for item in self.alternatives.pop(id(before), ())[1:]:
            self.changed(item, hole("a value that changes"))
        is_held = False
        for scope in self.scopes():
            self.reading.spend(1 + len(scope))
            for name, value in scope.items():
                if value is before or holds(value, before):
                    scope[name], is_held = after if value is before else hole("a value that changes"), True
        for item in before if is_held and isinstance(before, list) and not isinstance(after, list) else ():
            if isinstance(item, tuple) and is_train(known(item) or ""):
                self.reading.unread[item[0].lines[0]] = f"{shown(item)} in a list that changes: may be started too"

    def ways(self, value: Any) -> list[Any]:
        """A value, and the lists, dicts and records of which it may be one."""
        ways = [value]
        for way in ways:
            others = self.alternatives.get(id(way), ())[1:]
            ways += [other for other in others if not any(other is each for each in ways)]
        return ways

    def parts(self, value: Any) -> list[Any]:
        """What a list, dict or record holds, or each that the value may be."""
        held = [way.fields if isinstance(way, Record) else way for way in self.ways(value)]
        lists = [[*each.values()] if isinstance(each, dict) else each for each in held if isinstance(each, list | dict)]
        return sum(lists, [])

    def lose(self, *values: Any) -> None:
        """What may change out of sight is not known from then on, nor is what it holds; a function may run."""
        for value in values:
            ways, parts = self.ways(value), self.parts(value)
            for way in ways:
                self.alternatives.pop(id(way), None)
                if isinstance(way, ast.FunctionDef):
                    self.may_run(way)
                elif isinstance(way, Record):
                    way.fields |= {name: hole(name) for name in way.fields}
                elif isinstance(way, list | dict):
                    self.changed(way, hole("a value that may change"))
            self.lose(*parts)

    def lose_within(self, *nodes: ast.AST) -> None:
        """Lose what the calls in parts that are not read may change."""
        for call in (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Call)):
            parts = [getattr(call.func, "value", call.func), *call.args, *(keyword.value for keyword in call.keywords)]
            plain = [part for part in parts if not any(isinstance(inner, ast.Call) for inner in ast.walk(part))]
            self.lose(*(self.visit(part) for part in plain if not self.leaves(call)))

    @abstractmethod
    def may_run(self, function: ast.FunctionDef) -> None:
        """Read a function that may be called out of sight."""

    def leaves(self, node: ast.Call) -> bool:
        return LEAVES_GIVEN.fullmatch(self.dotted(node.func)) is not None

    def dotted(self, node: ast.expr) -> str:
        """The name of a function with its module, as the launcher imports it."""
        if isinstance(node, ast.Attribute):
            return f"{self.dotted(node.value)}.{node.attr}"
        return shown(as_text(self.visit(node))) if isinstance(node, ast.Name) else ""

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
                self.changed(owner, self.unknown(target.value, value))
        elif isinstance(target, ast.Tuple | ast.List):
            has_rest = any(isinstance(part, ast.Starred) for part in target.elts)
            is_known = isinstance(value, list) and len(value) == len(target.elts) and not has_rest
            self.lose(*(() if is_known else self.parts(value)))
            for index, part in enumerate(target.elts):
                self.assign(part, value[index] if is_known else self.unknown(target))
        elif isinstance(target, ast.Subscript):
            owner, key = self.visit(target.value), key_of(self.visit(target.slice))
            is_known = isinstance(owner, dict) and key is not None
            self.reading.spend(1 + len(owner) if is_known else 1)
            self.changed(owner, owner | {key: value} if is_known else self.unknown(target, value))

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
        return truth_of(self.visit(node))

    # Expressions.

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):
            return self.reading.paid(literal(node.value, lines_of(node)))
        return node.value if isinstance(node.value, PLAIN) else self.unknown(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Text:
        return self.reading.paid(tuple(piece for part in node.values for piece in as_text(self.visit(part))))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Text:
        value = self.visit(node.value)
        is_plain = node.format_spec is None and node.conversion == -1
        self.visit(node.format_spec or ast.Constant(""))
        return as_text(value, lines_of(node)) if is_plain else self.unknown(node.value)

    def visit_Name(self, node: ast.Name) -> Any:
        for scope in (self.outside.get(node.id, self.locals), *reversed(self.around), self.globals):
            if node.id in scope:
                return scope[node.id]
        return self.unknown(node)

    def visit_Expr(self, node: ast.Expr | ast.Await) -> Any:
        return self.visit(node.value)

    visit_Await = visit_Expr

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
        decides, is_sure, values = isinstance(node.op, ast.Or), True, list[Any]()
        for part in node.values:
            values.append(self.visit(part))
            if not is_sure:  # the part may not run
                self.forget(part)
            truth = truth_of(values[-1])
            is_sure = is_sure and truth is not None
            if truth is decides:
                break
        return values[-1] if is_sure else self.unknown(node, *values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return self.unknown(node) if truth is None else not truth
        value = self.visit(node.operand)
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else self.unknown(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        left, kind, (right, *_) = self.visit(node.left), node.ops[0], [*map(self.visit, node.comparators)]
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
        if isinstance(left, Shared) or isinstance(right, Shared):
            return self.unknown(node, *self.parts(left), *self.parts(right))
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
        return values if is_sure else self.unknown(node, *values)

    visit_Tuple = visit_Set = visit_List

    def items(self, nodes: Sequence[ast.expr]) -> tuple[list[Any], bool]:
        """The values of expressions up to a `*` whose items are not known, and whether that is all."""
        values, is_sure = list[Any](), True
        for node in nodes:
            value = self.visit(node.value if isinstance(node, ast.Starred) else node)
            is_sure = is_sure and (not isinstance(node, ast.Starred) or isinstance(value, list))
            if is_sure:
                values += value if isinstance(node, ast.Starred) else [value]
            else:
                self.lose(value)
        return values, is_sure

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        first, *more = node.generators
        values, items = self.visit(first.iter), []
        if more or first.ifs or not isinstance(values, list) or len(values) > LOOPS:
            self.lose_within(node)
            self.fork(says(node), lambda: self.lose(self.visit(node.elt)), lambda: None)
            return self.unknown(node, *self.parts(values))
        targets = names_set(first.target)
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
        return self.unknown(node, *values) if None in keys else dict(zip(keys, values, strict=True))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        owner, key = self.visit(node.value), key_of(self.visit(node.slice))
        if isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        return owner[key] if isinstance(owner, dict) and key in owner else self.unknown(node, *self.parts(owner))


def says(node: ast.AST) -> str:
    """What the launcher says in a place, on one line."""
    return " ".join(ast.unparse(node).split())[:200]


def lines_of(node: ast.AST) -> Lines:
    first = getattr(node, "lineno", 0)
    return first, getattr(node, "end_lineno", None) or first


def name_of(node: ast.expr | None) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def names_set(*nodes: ast.AST) -> list[str]:
    """The names that some parts set; a name that they only add to is left out."""
    parts = [part for node in nodes for part in ast.walk(node)]
    added = {id(part.target) for part in parts if isinstance(part, ast.AugAssign)}
    stored = [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store | ast.Del)
              and id(part) not in added]  # fmt: skip
    bound = [part.name for part in parts if isinstance(part, ast.MatchAs | ast.MatchStar | ast.ExceptHandler)]
    return [*stored, *(name for name in bound if name is not None)]


def holds(value: Any, part: Any) -> bool:
    """Whether a list or dict holds another one, at any depth."""
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return any(item is part or holds(item, part) for item in inner)


def key_of(value: Any) -> Any:
    """A value as Python finds it in a dict; None where it is not known."""
    return known(value) if isinstance(value, tuple) else value if isinstance(value, bool | int | float) else None


def as_text(value: Any, lines: Lines = (0, 0)) -> Text:
    """A value as an f-string shows it."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, PLAIN):
        return literal(str(value), lines)
    return hole("a value that is no text", lines)


def truth_of(value: Any) -> bool | None:
    """Whether a value counts as true; None where it is not known."""
    if isinstance(value, tuple):
        is_sure = any(piece.text and not piece.branch for piece in value)
        return True if is_sure else None if known(value) is None else False
    return bool(value) if isinstance(value, PLAIN | list | dict) else None


def equal(first: Any, second: Any) -> bool | None:
    """Whether two texts or plain values are equal; None where one is not known, or is another value."""
    texts = [shown(value) if isinstance(value, tuple) else value for value in (first, second)]
    is_known = [isinstance(value, PLAIN) or isinstance(value, tuple) and known(value) is not None
                for value in (first, second)]  # fmt: skip
    return texts[0] == texts[1] if all(is_known) else None
