"""Launchers in Python, read as a syntax tree and never executed: the command line that each start of train.py gets.

The values of a dataclass of arguments are its defaults, and what the user gives on the launcher's command line. A
branch whose condition is not known is read both ways, and what only one way gives is marked with the condition.

A value is a `Text`, a number, a bool, None, a list, a dict, a `Record`, or the node of a function or class of the
launcher. A value that only running the launcher would tell is a text with a piece that is not known.
"""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from mis_plugins.config.file import INLINE
from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch import bash
from mis_plugins.explain.launch.words import (
    PACKAGES,
    Ended,
    Joined,
    Launch,
    Lines,
    Piece,
    Reader,
    Reading,
    Returned,
    Text,
    all_of,
    any_of,
    hole,
    is_train,
    known,
    literal,
    shown,
    under,
    with_holes,
    with_places,
)

STARTS = "execute_train"  # Miles's functions that begin so hand `train_args` to train.py
BASE_OF_MILES = "ExecuteTrainConfig"
OF_MILES = {"num_nodes": 1, "cuda_core_dump": False, "extra_env_vars": (), "output_dir": literal("/root/shared_data")}
"""What a launcher has from Miles's own dataclass, by its defaults at 31f1ca9."""
GIVE_NOTHING = ("get_default_wandb_args", "get_mooncake_object_store_args")  # Miles's helpers: no flag of ours
PLAINLY = {"strip": str.strip, "lower": str.lower}
WRITES = ("write", "writelines", "write_text", "write_bytes")
NAMES = ("str", "Path")  # functions that return the name of a file
PURE = ("get", "items", "keys", "values", "copy", "index", "count")  # methods that change no list and no dict
SET_ANY_NAME = ("exec", "globals", "locals")
DECORATES = {"dataclass", "command", "callback", "dataclass_cli", "property", "staticmethod", "classmethod", "cache"}
LOOPS = 1000  # rounds of one loop
LARGEST = 2**63  # of a number; a power would fill the memory
PLAIN = bool | int | float | None


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


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a launcher.

    Args:
        arguments: what the user gives to the launcher: its command, where it has several, and options.

    Raises:
        ConfigError: the launcher is no Python, nests deeper than any launcher does, or takes no such option.
    """
    try:
        launcher = Launcher(script, path, reading, arguments)
        launcher.run_everything(ast.parse(script))
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno}: no Python ({error.msg})") from None
    except (RecursionError, MemoryError):
        raise ConfigError("nested deeper than any launcher; give a shell script that starts train.py") from None
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    return launcher.found


class Launcher(Reader, ast.NodeVisitor):
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
        self.returns: list[tuple[str, Returned]] = []
        self.alternatives: dict[int, tuple[Any, Any, Any]] = {}  # of two lists, dicts or records, each with its address
        self.hosts: set[str] = set()

    @property
    def locals(self) -> dict[str, Any]:
        return self.frames[-1]

    def scopes(self) -> list[dict[str, Any]]:
        return [self.defaults, *self.frames, *(record.fields for record in self.records)]

    def fork(self, label: str, one: Callable[[], object], other: Callable[[], object]) -> None:
        self.forks += 1
        try:
            super().fork(label, one, other)
        finally:
            self.forks -= 1

    def remember(self, branch: str, ended: Ended) -> None:
        if isinstance(ended, Returned):
            self.returns.append((branch, ended))

    def either(self, one: Any, other: Any, branch: str) -> Any:
        value = super().either(one, other, branch)
        if one is not other and (isinstance(one, Shared) or isinstance(other, Shared)):
            self.alternatives[id(value)] = value, one, other
        return value

    def run_everything(self, tree: ast.Module) -> None:
        """Read the file as its start would run it; where that starts no training, each command by itself."""
        for node in ast.walk(tree):
            named = [one.name for one in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
            self.hosts |= {(name or "").partition(".")[0] for name in named} & PACKAGES
        self.attempt(lambda: self.block(tree.body))
        if not self.found:
            self.run_commands()
        if self.options and self.of_fields is None:
            self.reading.unread[0] = f"{' '.join(self.options)}: no command is seen that takes it"

    def run_commands(self) -> None:
        functions = [one for one in self.globals.values() if isinstance(one, ast.FunctionDef)]
        decorated = [one for one in functions if one.decorator_list]
        commands = [
            one for one in decorated if {"command", "callback"} & set(map(_name, one.decorator_list))
        ] or decorated
        asked = (self.command or "").replace("-", "_")
        for node in [one for one in commands if one.name == asked] or commands:
            self.attempt(lambda node=node: self.command_line(node))

    def visit(self, node: ast.AST) -> Any:
        self.reading.spend()
        return super().visit(node)

    def generic_visit(self, node: ast.AST) -> Any:
        """What has no rule of its own is not known, nor is a name that it sets."""
        self.forget(node)
        return self.unknown(node) if isinstance(node, ast.expr) else None

    def forget(self, *nodes: ast.AST) -> None:
        """The names that some parts set are not known."""
        for name in _names(*nodes):
            self.store(name, hole(name))

    def unknown(self, node: ast.AST) -> Text:
        return hole(_said(node), _lines(node))

    def unread(self, node: ast.AST, why: str) -> None:
        self.reading.unread[_lines(node)[0]] = f"{_said(node)}: {why}"

    def store(self, name: str, value: Any) -> None:
        self.outside.get(name, self.locals)[name] = value

    def changed(self, before: Any, after: Any) -> None:
        """Give all names of a list, dict or record, which the launcher changes in place, its new value."""
        for one in before if isinstance(before, list) and not isinstance(after, list) else ():
            if isinstance(one, tuple) and is_train(known(one) or ""):
                self.reading.unread[one[0].lines[0]] = f"{shown(one)} in a list that changes: may be started too"
        for one in self.alternatives.pop(id(before), ())[1:]:
            self.changed(one, hole("a value that changes"))
        for scope in self.scopes():
            self.reading.spend(1 + len(scope))
            for name, value in scope.items():
                if value is before:
                    scope[name] = after
                elif _holds(value, before):
                    scope[name] = hole("a value that changes")

    # Statements.

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.store(node.name, node)
        self.define(node)

    def define(self, node: ast.FunctionDef) -> None:
        """Defaults have the values that their names have where the function is defined."""
        self.enclosing[node] = [*self.around, *self.frames[1:][-1:]]
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.defaults[_place(default)] = self.visit(default)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.store(node.name, node)
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                self.define(part)
            elif isinstance(part, ast.AnnAssign) and part.value is not None and _name(part.value) != "field":
                self.defaults[_place(part.value)] = self.visit(part.value)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for one in node.names:
            self.store((one.asname or one.name).partition(".")[0], hole(one.name))

    visit_ImportFrom = visit_Import

    def visit_Global(self, node: ast.Global) -> None:
        self.outside |= dict.fromkeys(node.names, self.globals)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.outside |= {name: scope for scope in self.around for name in node.names if name in scope}

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self.assign(target, self.unknown(target))

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        for target in node.targets:
            self.assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        before = self.visit(node.target)
        value = self.operate(node, before, node.op, self.visit(node.value))
        if isinstance(before, Shared) or id(before) in self.alternatives:
            self.changed(before, value)
        self.assign(node.target, value)

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

    def visit_If(self, node: ast.If) -> None:
        test = (_said(node.test), self.truth(node.test), lambda: self.block(node.body))
        self.choose([test, ("else", True, lambda: self.block(node.orelse))])

    def visit_Match(self, node: ast.Match) -> None:
        said, subject = _said(node.subject), self.visit(node.subject)
        self.choose(
            [
                (
                    f"{said} is {_said(case.pattern)}",
                    self.fits(subject, case.pattern) if case.guard is None else None,
                    lambda case=case: self.case(case, subject),
                )
                for case in node.cases
            ]
        )

    def case(self, case: ast.match_case, subject: Any) -> None:
        self.forget(case.pattern)
        if isinstance(case.pattern, ast.MatchAs) and case.pattern.name is not None:
            self.store(case.pattern.name, subject)
        self.block(case.body)

    def fits(self, subject: Any, pattern: ast.pattern) -> bool | None:
        if isinstance(pattern, ast.MatchAs):
            return pattern.pattern is None or self.fits(subject, pattern.pattern)
        if isinstance(pattern, ast.MatchValue):
            return _equal(subject, self.visit(pattern.value))
        if isinstance(pattern, ast.MatchOr):
            return any_of([self.fits(subject, one) for one in pattern.patterns])
        has_rest = any(isinstance(part, ast.MatchStar) for part in ast.walk(pattern))
        if isinstance(pattern, ast.MatchSequence) and isinstance(subject, list) and not has_rest:
            pairs = zip(subject, pattern.patterns, strict=False)
            return all_of([len(subject) == len(pattern.patterns), *(self.fits(*pair) for pair in pairs)])
        return None

    def visit_For(self, node: ast.For) -> None:
        values = self.visit(node.iter)
        if isinstance(values, list) and len(values) <= LOOPS:
            self.rounds(node, values)
        else:
            self.some_rounds(node, f"for {_said(node.target)} in {_said(node.iter)}")

    def visit_While(self, node: ast.While) -> None:
        self.some_rounds(node, f"while {_said(node.test)}")

    def some_rounds(self, node: ast.For | ast.While, label: str) -> None:
        """A loop whose number of rounds is not known: one round tells what it starts."""
        value = self.unknown(node.target if isinstance(node, ast.For) else node.test)
        self.fork(label, lambda: self.rounds(node, [value]), lambda: self.block(node.orelse))
        self.forget(*node.body)

    def rounds(self, node: ast.For | ast.While, values: Sequence[Any]) -> None:
        outer, self.round = self.round, self.forks
        try:
            for value in values:
                if isinstance(node, ast.For):
                    self.assign(node.target, value)
                try:
                    self.block(node.body)
                except Round as ended:
                    if ended.breaks:
                        return
            self.block(node.orelse)
        finally:
            self.round = outer

    def visit_Break(self, node: ast.Break | ast.Continue) -> None:
        if self.forks == self.round:
            raise Round(isinstance(node, ast.Break))
        self.unread(node, f"depends on {self.branch}")

    visit_Continue = visit_Break

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            value = self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        self.block(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        """No statement is taken to raise anything, but for `raise`."""
        outer, self.tried = self.tried, self.forks if node.handlers else self.tried
        try:
            ended = self.attempt(lambda: self.block([*node.body, *node.orelse]))
        finally:
            self.tried = outer
        if node.handlers:
            self.reading.assumed[f"nothing raises in lines {node.lineno} to {node.end_lineno}"] = None
        if isinstance(ended, Raised) and node.handlers:
            if len(node.handlers) > 1:
                self.unread(node, "one of several handlers goes on")
            self.reading.ended = ""
            handler = node.handlers[0]
            if handler.name is not None:
                self.store(handler.name, hole(handler.name))
            ended = self.attempt(lambda: self.block(handler.body))
        self.block(node.finalbody)
        if ended is not None:
            raise ended

    def visit_Return(self, node: ast.Return) -> None:
        value = None if node.value is None else self.visit(node.value)
        raise Returned((value, [dict(scope) for scope in self.scopes()]))

    def visit_Raise(self, node: ast.Raise) -> None:
        if self.tried is not None and self.forks > self.tried:
            self.unread(node, f"depends on {self.branch}, and a handler may go on")
        self.reading.ended = f": with these arguments the launcher raises in line {node.lineno}"
        raise Raised

    # Expressions.

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):
            return self.reading.paid(literal(node.value, _lines(node)))
        return node.value if isinstance(node.value, PLAIN) else self.unknown(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Text:
        return self.reading.paid(tuple(piece for part in node.values for piece in _text(self.visit(part))))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Text:
        value = self.visit(node.value)
        is_plain = node.format_spec is None and node.conversion == -1
        return _text(value, _lines(node)) if is_plain else self.unknown(node.value)

    def visit_Name(self, node: ast.Name) -> Any:
        for scope in (self.outside.get(node.id, self.locals), *reversed(self.around), self.globals):
            if node.id in scope:
                return scope[node.id]
        return self.unknown(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner = self.visit(node.value)
        if not isinstance(owner, Record):
            return self.unknown(node)
        if node.attr in owner.fields:
            return owner.fields[node.attr]
        method = self.method(owner, node.attr)
        is_property = method is not None and "property" in map(_name, method.decorator_list)
        return self.call(method, [owner], {}) if method and is_property else self.unknown(node)

    def method(self, owner: Record, name: str) -> ast.FunctionDef | None:
        parts = [part for kind in self.lineage(owner.node) for part in reversed(kind.body)]
        return next((one for one in parts if isinstance(one, ast.FunctionDef) and one.name == name), None)

    def lineage(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """A class of the launcher and those that it inherits from, the nearest first."""
        bases = [self.globals.get(_name(base)) for base in node.bases]
        return [node, *(kind for base in bases if isinstance(base, ast.ClassDef) for kind in self.lineage(base))]

    def truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds; a part of it may decide where another is not known."""
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(part) for part in node.values]
            return any_of(parts) if isinstance(node.op, ast.Or) else all_of(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            truth = self.truth(node.operand)
            return None if truth is None else not truth
        return _truth(self.visit(node))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Any:
        value = self.visit(node.value)
        self.assign(node.target, value)
        return value

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        truth = self.truth(node.test)
        if truth is None:
            return self.either(self.visit(node.body), self.visit(node.orelse), _said(node.test))
        return self.visit(node.body if truth else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        decides, is_sure = isinstance(node.op, ast.Or), True
        value: Any = None
        for part in node.values:
            value = self.visit(part)
            truth = _truth(value)
            is_sure = is_sure and truth is not None
            if truth is decides:
                break
        return value if is_sure else self.unknown(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        truth = _truth(value) if isinstance(node.op, ast.Not) else None
        return self.unknown(node) if truth is None else not truth

    def visit_Compare(self, node: ast.Compare) -> Any:
        one, kind, other = self.visit(node.left), node.ops[0], self.visit(node.comparators[0])
        found: bool | None = None
        if isinstance(kind, ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
            found = _equal(one, other)
        elif isinstance(kind, ast.In | ast.NotIn) and isinstance(other, list | dict):
            found = any_of([_equal(one, literal(key) if isinstance(key, str) else key) for key in other])
        if found is None or len(node.ops) > 1:
            return self.unknown(node)
        return found != isinstance(kind, ast.NotEq | ast.IsNot | ast.NotIn)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        return self.operate(node, self.visit(node.left), node.op, self.visit(node.right))

    def operate(self, node: ast.AST, one: Any, kind: ast.operator, other: Any) -> Any:
        """Texts and lists are added, paths divided and whole numbers multiplied; any other value is not known."""
        if isinstance(kind, ast.Div) and isinstance(one, tuple) and isinstance(other, tuple):
            return self.divided(node, one, other)
        adds = isinstance(kind, ast.Add)
        if isinstance(one, list) and isinstance(other, list) and adds:
            self.reading.spend(len(one) + len(other))
            return one + other
        if isinstance(one, list) or isinstance(other, list):
            return self.unknown(node)
        if adds and (isinstance(one, tuple) or isinstance(other, tuple)):
            return self.reading.paid((*_text(one), *_text(other)))
        if isinstance(kind, ast.Mult) and isinstance(one, int) and isinstance(other, int):
            return one * other if abs(one * other) < LARGEST else self.unknown(node)
        return self.unknown(node)

    def divided(self, node: ast.AST, one: Text, other: Text) -> Text:
        """Two parts of a path."""
        said, more = known(one), known(other)
        if said is not None and more is not None:
            return self.reading.paid(literal(str(PurePosixPath(said) / more), _lines(node)))
        may_replace = other[:1] and (other[0].text or "")[:1] in "/."  # all before it, or nothing
        return self.unknown(node) if may_replace else self.reading.paid((*one, Piece("/"), *other))

    def visit_List(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        values = [self.visit(one.value if isinstance(one, ast.Starred) else one) for one in node.elts]
        pairs = list(zip(node.elts, values, strict=True))
        if any(isinstance(one, ast.Starred) and not isinstance(value, list) for one, value in pairs):
            return self.unknown(node)
        return [item for one, value in pairs for item in (value if isinstance(one, ast.Starred) else [value])]

    visit_Tuple = visit_Set = visit_List

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        first, *more = node.generators
        values, found = self.visit(first.iter), []
        if more or first.ifs or not isinstance(values, list) or len(values) > LOOPS:
            return self.unknown(node)
        names = _names(first.target)
        before = {name: self.locals[name] for name in names if name in self.locals}
        for value in values:
            self.assign(first.target, value)
            found.append(self.visit(node.elt))
        for name in names:
            self.locals.pop(name, None)
        self.locals.update(before)
        return found

    visit_GeneratorExp = visit_ListComp

    def visit_Dict(self, node: ast.Dict) -> Any:
        keys = [None if key is None else _key(self.visit(key)) for key in node.keys]
        values = [self.visit(value) for value in node.values]
        return self.unknown(node) if None in keys else dict(zip(keys, values, strict=True))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        owner, key = self.visit(node.value), _key(self.visit(node.slice))
        if isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        return owner[key] if isinstance(owner, dict) and key in owner else self.unknown(node)

    # Calls.

    def visit_Call(self, node: ast.Call) -> Any:
        given, named, is_sure = self.arguments(node)
        name, target = _name(node.func), None
        if isinstance(node.func, ast.Attribute):
            owner = self.visit(node.func.value)
            if isinstance(owner, Record):
                target = self.method(owner, name)
                kinds = set(map(_name, target.decorator_list)) if target else set[str]()
                given = given if "staticmethod" in kinds else [owner, *given]
            elif isinstance(owner, list) and name in ("append", "extend") and given:
                added = given[:1] if name == "append" else given[0]
                self.changed(owner, owner + added if isinstance(added, list) else self.unknown(node))
            elif (isinstance(owner, list | dict) or id(owner) in self.alternatives) and name not in PURE:
                self.changed(owner, self.unknown(node))
            elif isinstance(owner, tuple) and (found := self.of_text(owner, name, given, named)) is not None:
                return found
        else:
            target = self.visit(node.func)
            pieces = target if isinstance(target, tuple) else ()
            meant = [piece.source.rpartition(".")[2] for piece in pieces if piece.text is None]
            name = next((one for one in meant if one.startswith(STARTS) and one.isidentifier()), name)
        if isinstance(target, ast.FunctionDef):
            parameters = [] if is_sure else _parameters(target.args)
            return self.call(target, given, dict.fromkeys(parameters[len(given) :], self.unknown(node)) | named)
        if isinstance(target, ast.ClassDef):
            fields = [] if is_sure else list(self.fields(target))
            return self.instance(target, given, dict.fromkeys(fields[len(given) :], self.unknown(node)) | named)
        if name.startswith(STARTS) and not is_sure:
            named = {"train_args": self.unknown(node)} | named
        return self.foreign(node, name, given, named)

    def arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any], bool]:
        """What a call gives by place and by name, and whether that is all: `*` and `**` may give more."""
        given, named, is_sure = list[Any](), dict[str, Any](), True
        for one in node.args:
            value = self.visit(one.value if isinstance(one, ast.Starred) else one)
            is_sure = is_sure and (not isinstance(one, ast.Starred) or isinstance(value, list))
            if is_sure:
                given += value if isinstance(one, ast.Starred) else [value]
        for one in node.keywords:
            value = self.visit(one.value)
            is_sure = is_sure and (one.arg is not None or isinstance(value, dict))
            named |= {one.arg: value} if one.arg is not None else value if isinstance(value, dict) else {}
        return given, named, is_sure

    def of_text(self, owner: Text, name: str, given: list[Any], named: Mapping[str, Any]) -> Any:
        """The value of a method of a text, of a path or of an open file; None where that is not known."""
        said = known(owner)
        if name == "join" and given and isinstance(given[0], list) and said is not None:
            parts = [piece for one in given[0] for piece in (*_text(one), Piece(said))]
            return self.reading.paid(tuple(parts[:-1]))
        if name == "open":
            return self.opened(owner, given, named)
        if name in WRITES:
            is_text = name in ("write", "write_text") and given
            self.write(owner, _text(given[0]) if is_text else hole(name), adds=name in ("write", "writelines"))
        if name == "strip" and said is None and owner:
            return owner  # blanks at its ends part no words
        is_plain = name in PLAINLY and not given and said is not None
        return self.reading.paid(literal(PLAINLY[name](said))) if is_plain else None

    def opened(self, path: Text, given: Sequence[Any], named: Mapping[str, Any]) -> Text:
        """An open file, which is a path; one that may be written is known by its address."""
        mode = known(_text(given[0] if given else named.get("mode", literal("r"))))
        if mode is not None and set("wx") & set(mode):
            self.write(path, (), adds=False)
        elif mode is None or set("a+") & set(mode):
            self.reading.files.setdefault(shown(path), hole("what it holds before"))
        else:
            return path
        file = tuple([*path])
        self.handles[id(file)] = file
        return file

    def write(self, path: Text, text: Text, adds: bool = True) -> None:
        """Keep what the launcher writes into a file; what only a branch writes is not sure."""
        before = self.reading.files.get(shown(path), ()) if adds else ()
        self.reading.files[shown(path)] = self.reading.paid(
            before + (under(text, self.branch) if self.branch else text)
        )

    def call(self, node: ast.FunctionDef, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        outer = self.returns, self.outside, self.around, self.round
        with self.deeper():
            self.frames.append(self.parameters(node, given, named))
            self.returns, self.outside, self.around = [], {}, self.enclosing.get(node, [])
            try:
                value = self.ended_by(self.attempt(lambda: self.block(node.body)))
            finally:
                self.frames.pop()
                self.returns, self.outside, self.around, self.round = outer
        is_plain = DECORATES.issuperset(map(_name, node.decorator_list)) and not _yields(node)
        return value if is_plain else self.unknown(node)

    def ended_by(self, ended: Ended | None) -> Any:
        """What a function gives back over all ways in which it may end; the names that it sets hold what all leave."""
        value = None
        if isinstance(ended, Returned):
            value = ended.value[0]
        elif ended is not None and not self.returns:
            raise ended
        elif ended is not None:  # one way ends the launcher
            value, state = self.returns.pop()[1].value
            self._restore(state)
        for branch, returned in reversed(self.returns):
            earlier, state = returned.value
            value, joined = self.either(earlier, value, branch), Joined()
            for scope, names in zip(self.scopes(), state, strict=False):
                self.join(names, scope, branch, joined)
        return value

    def parameters(self, node: ast.FunctionDef, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The names of a function's parameters with their values."""
        asked = node.args
        plain = [*asked.posonlyargs, *asked.args]
        defaults = [*[None] * (len(plain) - len(asked.defaults)), *asked.defaults, *asked.kw_defaults]
        names = [*plain, *asked.kwonlyargs]
        found = dict(zip((one.arg for one in plain), given, strict=False))
        found |= {one.arg: named[one.arg] for one in names if one.arg in named}
        for parameter, default in zip(names, defaults, strict=True):
            if parameter.arg not in found:
                found[parameter.arg] = self.left_out(parameter, default)
        if asked.vararg is not None:
            found[asked.vararg.arg] = list(given[len(plain) :])
        if asked.kwarg is not None:
            found[asked.kwarg.arg] = {name: value for name, value in named.items() if name not in found}
        return found

    def left_out(self, parameter: ast.arg, default: ast.expr | None) -> Any:
        """A parameter that nobody gives: its default, or the dataclass that the command line fills."""
        if default is not None:
            return self.defaults.get(_place(default), hole(_said(default), _lines(default)))
        kind = self.globals.get(_name(parameter.annotation))
        is_filled = isinstance(kind, ast.ClassDef)
        filled = self.of_fields or {}
        return self.instance(kind, [], filled) if is_filled else hole(parameter.arg, _lines(parameter))

    def instance(self, node: ast.ClassDef, given: Sequence[Any], named: Mapping[str, Any]) -> Record:
        record = Record({}, node)
        self.records.append(record)
        fields = self.fields(node)
        if BASE_OF_MILES in self.bases(node):
            self.reading.assume_unset("SLURM_JOB_NUM_NODES")
            record.fields |= OF_MILES
        record.fields |= {name: self.default(value) for name, value in fields.items()}
        made = self.method(record, "__init__")
        if made is not None:
            self.call(made, [record, *given], named)
            return record
        record.fields |= dict(zip(fields, given, strict=False)) | dict(named)
        after = self.method(record, "__post_init__")
        if after is not None:
            self.call(after, [record], {})
        return record

    def fields(self, node: ast.ClassDef) -> dict[str, ast.expr | None]:
        """Fields of a dataclass with their defaults; those that it inherits from elsewhere are not known."""
        parts = [part for kind in reversed(self.lineage(node)) for part in kind.body]
        declared = [one for one in parts if isinstance(one, ast.AnnAssign)]
        return {one.target.id: one.value for one in declared if isinstance(one.target, ast.Name)}

    def default(self, value: ast.expr | None) -> Any:
        if isinstance(value, ast.Call) and _name(value.func) == "field":
            said = {one.arg: one.value for one in value.keywords}
            factory = said.get("default_factory")
            plain = factory.body if isinstance(factory, ast.Lambda) else said.get("default")
            return self.unknown(value) if plain is None else self.visit(plain)
        return (
            hole("a field without default") if value is None else self.defaults.get(_place(value), self.unknown(value))
        )

    def bases(self, node: ast.ClassDef) -> set[str]:
        """The names of the classes that a class inherits from and that the launcher does not define."""
        names = {_name(base) for kind in self.lineage(node) for base in kind.bases}
        return {name for name in names if not isinstance(self.globals.get(name), ast.ClassDef)}

    def kinds(self, node: ast.ClassDef) -> dict[str, str]:
        """The types of a dataclass's fields."""
        parts = [part for kind in reversed(self.lineage(node)) for part in kind.body]
        declared = [one for one in parts if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        inherited = {name: type(value).__name__ for name, value in OF_MILES.items()}
        own = {_name(one.target): _kind(one.annotation, one.value) for one in declared}
        return (inherited if BASE_OF_MILES in self.bases(node) else {}) | own

    def command_line(self, node: ast.FunctionDef) -> Any:
        """Call the function that the launcher's command line runs, with what it sets."""
        plain = [*node.args.posonlyargs, *node.args.args]
        defaults = [*[None] * (len(plain) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
        own, fields, others = dict[str, str](), dict[str, str](), set[str]()
        for one, default in zip([*plain, *node.args.kwonlyargs], defaults, strict=True):
            kind = self.globals.get(_name(one.annotation))
            if isinstance(kind, ast.ClassDef):
                fields |= self.kinds(kind)
                others |= self.bases(kind) - {BASE_OF_MILES}
            else:
                own[one.arg] = _kind(one.annotation, default)
        found = _options(node.name, self.options, own | fields, bool(others))
        self.of_fields = {name: value for name, value in found.items() if name not in own}
        if more := [f"--{name}" for name in self.of_fields if name not in fields]:
            self.reading.unread[0] = f"{', '.join(more)}: {' or '.join(sorted(others))} may have the option"
        return self.call(node, [], {name: value for name, value in found.items() if name in own})

    def foreign(self, node: ast.Call, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        """A call of what the launcher imports; the value of a function that is not listed here is not known."""
        if name.startswith(STARTS):
            self.start(node, named.get("train_args", given[0] if given else ()))
            return None
        for value in (*given, *named.values()):
            self.shell(node, value)
            if name not in (*NAMES, "open"):
                self.hand_on(value)
            if id(value) in self.handles:
                self.write(value, self.unknown(node))
        if name in GIVE_NOTHING:
            return ()
        if name in ("exit", "_exit", "quit") and _name(getattr(node.func, "value", None)) in ("", "sys", "os"):
            self.reading.ended = f": with these arguments the launcher exits in line {node.lineno}"
            raise Ended
        if name in SET_ANY_NAME:
            self.unread(node, "may set any name")
        return self.listed(node, name, given, named) if given else self.unknown(node)

    def listed(self, node: ast.Call, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        """The value of an imported function that is listed here, by what the launcher gives it."""
        first, text = given[0], _text(given[0])
        if name == "run" and isinstance(first, ast.FunctionDef):  # typer.run(main)
            return self.command_line(first)
        if name in ("get", "getenv") and known(text) and _name(getattr(node.func, "value", None)) in ("environ", "os"):
            self.reading.assume_unset(shown(text))
            return given[1] if len(given) > 1 else None
        if name == "encode_pseudo_file":  # Miles's: a path that holds the text of a file
            said = known(text)
            whole = None if said is None else base64.b64encode(said.encode()).decode()
            return (Piece(INLINE, lines=_lines(node)), Piece(whole, _said(node), _lines(node)))
        if name == "setattr" and not isinstance(first, Record):
            self.changed(first, self.unknown(node))
        elif name == "setattr" and len(given) == 3:
            key = _key(given[1])
            first.fields |= dict.fromkeys(
                [*first.fields] if key is None else [key], given[2] if key else self.unknown(node)
            )
        if name == "open":
            return self.opened(text, given[1:], named)
        if name == "Path" and len(given) > 1:
            return self.unknown(node)
        if name == "Path" and (said := known(text)) is not None:
            return literal(str(PurePosixPath(said)), _lines(node))
        return text if name in NAMES else self.unknown(node)

    def start(self, node: ast.Call, text: Any) -> None:
        """`execute_train(train_args=...)`, which appends the text to `python3 train.py`."""
        values = [*(one.value for one in node.keywords if one.arg == "train_args"), *node.args]
        place = self.span(values[0]) if values else (0, 0)
        self.launch(node, (Piece("python3 train.py ", lines=_lines(node)), *_text(text)), place)

    def shell(self, node: ast.Call, command: Any) -> None:
        """A command of the shell that the launcher hands on, as one text or as words."""
        if isinstance(command, list):
            words = [one for one in command if isinstance(one, tuple)]
            if any(is_train(known(word) or "") for word in words):
                ends = Piece("'", lines=_lines(node)), Piece("' ")
                quoted = [piece for word in words for piece in (ends[0], *word, ends[1])]
                self.launch(node, tuple(quoted), (0, 0))
        elif isinstance(command, tuple) and any(map(is_train, with_holes(command).split())):
            self.launch(node, command, (0, 0))
        elif isinstance(command, tuple):
            sources = " ".join(piece.source for piece in command if piece.text is None)
            named = re.findall(r"[\w./-]+", sources)
            if any(is_train(one) or one.rpartition(".")[2].startswith(STARTS) for one in named):
                self.unread(node, "may start train.py too")

    def hand_on(self, value: Any) -> None:
        """Keep the words that a function gets, which may name a file that it writes; those of a start do not."""
        texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, tuple)]
        words = {word for one in texts for word in shown(one).split()}
        self.reading.handed |= set() if any(map(is_train, words)) else words

    def launch(self, node: ast.Call, text: Text, place: tuple[int, int]) -> None:
        for found in bash.launches(with_holes(text), self.path, self.reading):
            words, branch = tuple(with_places(found.words, text)), self.branch or found.branch
            hosts = frozenset(self.hosts)
            self.found.append(Launch(node.lineno, words, hosts, place, branch, True, found.folder))

    def span(self, node: ast.expr) -> tuple[int, int]:
        """The bytes of an expression in the launcher."""
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[last - 1] + column


def _said(node: ast.AST) -> str:
    """What the launcher says in a place, on one line."""
    return " ".join(ast.unparse(node).split())[:200]


def _lines(node: ast.AST) -> Lines:
    first = getattr(node, "lineno", 0)
    return first, getattr(node, "end_lineno", None) or first


def _place(node: ast.expr) -> str:
    return f"{node.lineno}:{node.col_offset}"


def _name(node: ast.expr | None) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _options(command: str, words: Sequence[str], kinds: Mapping[str, str], is_open: bool) -> dict[str, Any]:
    """The values that a command line sets, read as click does: what takes a value takes the next word, whatever it is.

    Args:
        kinds: the types of the options.
        is_open: whether there may be others; of those a word that begins as an option is no value.

    Raises:
        ConfigError: no such option, or a value too many or too few.
    """
    found: dict[str, Any] = {}
    listed = list(words)
    while listed:
        word = listed.pop(0)
        option, equals, said = word.partition("=")
        name = option[2:].replace("-", "_")
        kind, negated = kinds.get(name), name.removeprefix("no_")
        is_switch = kind == "bool" or kind is None and kinds.get(negated) == "bool"
        if option[:2] != "--" or kind is None and not is_switch and not is_open:
            raise ConfigError(f"{word}: no option of {command} ({', '.join(kinds)})")
        if is_switch and not equals:
            found[name if kind else negated] = bool(kind)
        elif kind is None and not is_switch and not equals and (not listed or listed[0].startswith("--")):
            found[name] = True
        elif is_switch or not equals and not listed:
            raise ConfigError(f"{word}: the option {'takes no' if is_switch else 'lacks its'} value")
        else:
            value = said if equals else listed.pop(0)
            found[name] = {"int": int, "float": float}.get(kind or "", literal)(value)
    return found


def _kind(annotation: ast.expr | None, default: ast.expr | None) -> str:
    """The type of an option by its annotation, or by its default."""
    named = [part.id for part in ast.walk(annotation or ast.Pass()) if isinstance(part, ast.Name)]
    by_default = type(default.value).__name__ if isinstance(default, ast.Constant) else "str"
    return next((name for name in named if name in ("bool", "int", "float", "str")), by_default)


def _names(*nodes: ast.AST) -> list[str]:
    """The names that some parts set, but for those that they only add to."""
    parts = [part for node in nodes for part in ast.walk(node)]
    added = {id(part.target) for part in parts if isinstance(part, ast.AugAssign)}
    stored = [part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store | ast.Del)
              and id(part) not in added]  # fmt: skip
    bound = [part.name for part in parts if isinstance(part, ast.MatchAs | ast.MatchStar | ast.ExceptHandler)]
    return [*stored, *(name for name in bound if name is not None)]


def _parameters(asked: ast.arguments) -> list[str]:
    return [one.arg for one in (*asked.posonlyargs, *asked.args, *asked.kwonlyargs)]


def _yields(node: ast.FunctionDef) -> bool:
    """Whether a function is a generator, whose value is no value of `return`."""
    return any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))


def _holds(value: Any, part: Any) -> bool:
    """Whether a list or dict holds another one, at any depth."""
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return any(one is part or _holds(one, part) for one in inner)


def _key(value: Any) -> Any:
    """A value as Python finds it in a dict; None where it is not known."""
    return known(value) if isinstance(value, tuple) else value if isinstance(value, bool | int | float) else None


def _text(value: Any, lines: Lines = (0, 0)) -> Text:
    """A value as an f-string shows it."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, PLAIN):
        return literal(str(value), lines)
    return hole("a value that is no text", lines)


def _truth(value: Any) -> bool | None:
    """Whether a value counts as true; None where it is not known."""
    if isinstance(value, tuple):
        is_sure = any(piece.text and not piece.branch for piece in value)
        return True if is_sure else None if known(value) is None else False
    return bool(value) if isinstance(value, PLAIN | list | dict) else None


def _equal(one: Any, other: Any) -> bool | None:
    """Whether two texts or plain values are equal; None where one is not known, or is another value."""
    said = [shown(value) if isinstance(value, tuple) else value for value in (one, other)]
    is_known = [isinstance(value, PLAIN) or isinstance(value, tuple) and known(value) is not None
                for value in (one, other)]  # fmt: skip
    return said[0] == said[1] if all(is_known) else None
