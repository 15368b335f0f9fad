"""Launchers in Python, read as a syntax tree and never executed: the command line that each start of train.py gets.

The values of a dataclass of arguments are its defaults, and what the user gives on the launcher's command line. A
branch whose condition is not known is read both ways, and what only one way gives is marked with the condition.
"""

from __future__ import annotations

import ast
import base64
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mis_plugins.config.file import INLINE
from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch import bash
from mis_plugins.explain.launch.values import (
    ARITHMETIC,
    LARGEST,
    Bound,
    Record,
    Unknown,
    any_of,
    compared,
    equal,
    quoted_text,
    shown_value,
    stripped,
    text_of_value,
    truth_of,
    typed,
)
from mis_plugins.explain.launch.words import (
    COMMAND_LINE,
    HOLE,
    Launch,
    Piece,
    Reading,
    Text,
    is_train,
    joined,
    known,
    literal,
    under,
    with_places,
)

STARTS = "execute_train"  # Miles's functions that begin so hand `train_args` to train.py
BASE_OF_MILES = "ExecuteTrainConfig"
DEEPEST = 32  # calls within one another
LOOPS = 1000  # rounds of one loop
GIVES_NONE_OF_OURS = ("get_default_wandb_args", "get_mooncake_object_store_args")  # flags of Miles's helpers
KEEPS = {
    "strip": str.strip,
    "rstrip": str.rstrip,
    "lstrip": str.lstrip,
    "lower": str.lower,
    "upper": str.upper,
}


class _Raised(Exception):
    """The launcher raises."""


class _Returned(Exception):
    """A function returns a value."""

    def __init__(self, value: Any):
        self.value = value


def launches(script: str, path: Path, reading: Reading, arguments: Sequence[str] = ()) -> list[Launch]:
    """Every start of train.py in a launcher.

    Args:
        arguments: what the user gives to the launcher: its command, where it has several, and options.

    Raises:
        ConfigError: the launcher is no Python, or nests deeper than any launcher does.
    """
    try:
        launcher = Launcher(ast.parse(script), script, path, reading, arguments)
        launcher.run_everything()
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno}: no Python ({error.msg})") from None
    except (RecursionError, MemoryError):
        raise ConfigError(
            "nested deeper than any launcher; give a shell script that starts train.py"
        ) from None
    except ValueError as error:
        if isinstance(error, ConfigError) or type(error) is not ValueError:
            raise
        raise ConfigError(f"no Python ({error})") from None
    return launcher.found


class Launcher(ast.NodeVisitor):
    """The values of a launcher as far as they are known; visiting a statement reads what it does."""

    def __init__(self, tree: ast.Module, script: str, path: Path, reading: Reading, arguments: Sequence[str]):
        self.tree, self.script, self.path, self.reading = tree, script, path, reading
        self.starts = [0, *_line_ends(script)]
        self.command, self.options = _options(arguments)
        self.globals: dict[str, Any] = {"__name__": literal("__main__", (0, 0))}
        self.locals = self.globals
        self.records: list[Record] = []
        self.returns: list[tuple[str, Any]] = []
        self.found: list[Launch] = []
        self.hosts: set[str] = set()
        self.depth = 0
        self.branch: str | None = None

    def run_everything(self) -> None:
        """Read the file as its start would run it; where that starts no training, each command by itself."""
        self.attempt(lambda: self.block(self.tree.body))
        if not self.found:
            for bound in self.commands():
                self.attempt(lambda bound=bound: self.call(bound, [], {}))

    def commands(self) -> Iterator[Bound]:
        """The launcher's commands, of which the user may name one."""
        bound = [value for value in self.globals.values() if isinstance(value, Bound)]
        decorated = [
            one for one in bound if isinstance(one.node, ast.FunctionDef) and one.node.decorator_list
        ]
        named = [
            one
            for one in decorated
            if one.node.name.replace("_", "-") == (self.command or "").replace("_", "-")
        ]
        yield from named or decorated

    def visit(self, node: ast.AST) -> Any:
        self.reading.spend()
        return super().visit(node)

    def generic_visit(self, node: ast.AST) -> Any:
        """What has no rule of its own is not known."""
        return self.unknown(node) if isinstance(node, ast.expr) else None

    # Statements.

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        self.visit(node.value)

    def visit_Import(self, node: ast.Import) -> None:
        self.hosts |= {alias.name.partition(".")[0] for alias in node.names} & {"miles", "slime"}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.hosts |= {(node.module or "").partition(".")[0]} & {"miles", "slime"}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.locals[node.name] = Bound(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.locals[node.name] = Bound(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.visit(node.value)
        for target in node.targets:
            self.assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        target = node.target
        if isinstance(target, ast.Name | ast.Attribute):
            before = self.visit(target)
            self.assign(target, self.operate(node, before, node.op, self.visit(node.value)))

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.locals[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.visit(target.value)
            if isinstance(owner, Record):
                owner.fields[target.attr] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, list) and len(value) == len(target.elts) else None
            for index, part in enumerate(target.elts):
                self.assign(part, parts[index] if parts else self.unknown(target))
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.locals[target.value.id] = self.unknown(target)

    def visit_If(self, node: ast.If) -> None:
        truth = truth_of(self.visit(node.test))
        if truth is None:
            self.fork(self.said(node.test), lambda: self.block(node.body), lambda: self.block(node.orelse))
        else:
            self.block(node.body if truth else node.orelse)

    def visit_Match(self, node: ast.Match) -> None:
        self.cases(self.said(node.subject), self.visit(node.subject), node.cases)

    def cases(self, said: str, subject: Any, cases: Sequence[ast.match_case]) -> None:
        if not cases:
            return
        case = cases[0]
        fits = self.fits(subject, case.pattern) if case.guard is None else None
        if fits:
            self.block(case.body)
        elif fits is False:
            self.cases(said, subject, cases[1:])
        else:
            label = f"{said} is {self.said(case.pattern)}"
            self.fork(label, lambda: self.block(case.body), lambda: self.cases(said, subject, cases[1:]))

    def fits(self, subject: Any, pattern: ast.pattern) -> bool | None:
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
            return True
        if isinstance(pattern, ast.MatchValue):
            return equal(subject, self.visit(pattern.value))
        if isinstance(pattern, ast.MatchSingleton):
            return equal(subject, pattern.value)
        if isinstance(pattern, ast.MatchOr):
            return any_of([self.fits(subject, one) for one in pattern.patterns])
        if isinstance(pattern, ast.MatchSequence) and isinstance(subject, list):
            if len(subject) != len(pattern.patterns):
                return False
            fits = [self.fits(*pair) for pair in zip(subject, pattern.patterns, strict=True)]
            return False if False in fits else None if None in fits else True
        return None

    def visit_For(self, node: ast.For) -> None:
        values = self.visit(node.iter)
        if isinstance(values, list) and len(values) <= LOOPS:
            for value in values:
                self.assign(node.target, value)
                self.block(node.body)
            return
        self.assign(node.target, self.unknown(node.target))
        label = f"for {self.said(node.target)} in {self.said(node.iter)}"
        self.fork(label, lambda: self.block(node.body), lambda: None)

    def visit_While(self, node: ast.While) -> None:
        self.fork(f"while {self.said(node.test)}", lambda: self.block(node.body), lambda: None)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            value = self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        self.block(node.body)

    def visit_Try(self, node: ast.Try) -> None:
        """A statement is taken to raise nothing."""
        self.block([*node.body, *node.orelse, *node.finalbody])

    def visit_Return(self, node: ast.Return) -> None:
        raise _Returned(None if node.value is None else self.visit(node.value))

    def visit_Raise(self, node: ast.Raise) -> None:
        self.reading.ended = f": with these arguments the launcher raises in line {node.lineno}"
        raise _Raised

    def attempt(self, work: Callable[[], object]) -> Exception | None:
        """Do some work; what ended it, if it raised or returned."""
        try:
            work()
        except (_Raised, _Returned) as ended:
            return ended
        return None

    def fork(self, branch: str, one: Callable[[], None], other: Callable[[], None]) -> None:
        """Read two branches, of which only running the launcher would tell the one that is taken."""
        before, outer = self.snapshot(), self.branch
        self.branch = outer or branch
        ended = self.attempt(one)
        first = self.snapshot()
        self.restore(before)
        self.branch = outer or f"not: {branch}"
        ended_other = self.attempt(other)
        self.branch = outer
        if ended_other is None and ended is None:
            self.join(first, branch)
        elif ended_other is None:
            self.remember(branch, ended)
        elif ended is None:
            self.restore(first)
            self.remember(f"not: {branch}", ended_other)
        else:
            self.remember(branch, ended)
            raise ended_other

    def remember(self, branch: str, ended: Exception | None) -> None:
        """Keep what a branch returned, for the value of the function."""
        if isinstance(ended, _Returned):
            self.returns.append((branch, ended.value))

    def snapshot(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return dict(self.locals), [dict(record.fields) for record in self.records]

    def restore(self, state: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        self.locals.clear()
        self.locals.update(state[0])
        for record, fields in zip(
            self.records, state[1], strict=False
        ):  # a branch may make records of its own
            record.fields.clear()
            record.fields.update(fields)

    def join(self, first: tuple[dict[str, Any], list[dict[str, Any]]], branch: str) -> None:
        self.joined_into(self.locals, first[0], branch)
        for record, fields in zip(self.records, first[1], strict=False):
            self.joined_into(record.fields, fields, branch)

    def joined_into(self, names: dict[str, Any], first: Mapping[str, Any], branch: str) -> None:
        for name in {**first, **names}:
            one, other = first.get(name), names.get(name)
            if one is not other:
                names[name] = self.either(one, other, branch)

    def either(self, one: Any, other: Any, branch: str) -> Any:
        """The value where one branch or the other was taken."""
        if type(one) is type(other) and not isinstance(one, Record | dict) and one == other:
            return one
        if isinstance(one, tuple) and isinstance(other, tuple):
            return self.paid(joined(one, other, branch))
        if isinstance(one, list) and isinstance(other, list) and one[: len(other)] == other:
            return other + [under(text_of_value(item), branch) for item in one[len(other) :]]
        return Unknown(f"a value that depends on {branch}", 0)

    # Expressions.

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):
            return self.paid(literal(node.value, _lines(node)))
        is_plain = node.value is None or isinstance(node.value, bool | int | float)
        return node.value if is_plain else self.unknown(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Text:
        parts = [self.visit(part) for part in node.values]
        return self.paid(tuple(piece for part in parts for piece in text_of_value(part)))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Text:
        value = self.visit(node.value)
        plain = node.format_spec is None and node.conversion == -1
        return text_of_value(value, _lines(node)) if plain else text_of_value(self.unknown(node.value))

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id in self.locals:
            return self.locals[node.id]
        return self.globals.get(node.id, self.unknown(node))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner = self.visit(node.value)
        if not isinstance(owner, Record):
            return self.unknown(node)
        if node.attr in owner.fields:
            return owner.fields[node.attr]
        method = self.method(owner, node.attr)
        is_property = method and any(
            _name(one) in ("property", "cached_property") for one in method.node.decorator_list
        )
        return self.call(method, [owner], {}) if method and is_property else self.unknown(node)

    def method(self, owner: Record, name: str) -> Bound | None:
        for part in self.lineage(owner.node):
            for statement in part.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == name:
                    return Bound(statement)
        return None

    def lineage(self, node: ast.ClassDef | None) -> Iterator[ast.ClassDef]:
        """A class and its bases in the launcher, the class first, each of them once."""
        waiting, met = [] if node is None else [node], set()
        while waiting:
            part = waiting.pop(0)
            if part in met:
                continue
            met.add(part)
            yield part
            bases = [self.globals.get(base.id) for base in part.bases if isinstance(base, ast.Name)]
            found = (base.node for base in bases if isinstance(base, Bound))
            waiting[:0] = [base for base in found if isinstance(base, ast.ClassDef)]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        truth = truth_of(self.visit(node.test))
        if truth is None:
            return self.either(self.visit(node.body), self.visit(node.orelse), self.said(node.test))
        return self.visit(node.body if truth else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        decides = isinstance(node.op, ast.Or)
        values: list[Any] = []
        for part in node.values:
            values.append(self.visit(part))
            truth = truth_of(values[-1])
            if truth is decides:
                return values[-1] if not any(truth_of(value) is None for value in values) else decides
        return values[-1] if not any(truth_of(value) is None for value in values) else self.unknown(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        truth = truth_of(value)
        if isinstance(node.op, ast.Not):
            return self.unknown(node) if truth is None else not truth
        is_number = isinstance(value, int | float) and isinstance(node.op, ast.USub)
        return -value if is_number else self.unknown(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            return self.unknown(node)
        one, other = self.visit(node.left), self.visit(node.comparators[0])
        found = compared(one, node.ops[0], other)
        return self.unknown(node) if found is None else found

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        return self.operate(node, self.visit(node.left), node.op, self.visit(node.right))

    def operate(self, node: ast.AST, one: Any, operator: ast.operator, other: Any) -> Any:
        if isinstance(one, list) and isinstance(other, list) and isinstance(operator, ast.Add):
            self.reading.spend(len(one) + len(other))
            return one + other
        if isinstance(one, tuple) or isinstance(other, tuple):
            if isinstance(operator, ast.Add):
                return self.paid(text_of_value(one) + text_of_value(other))
            if isinstance(operator, ast.Div):  # of paths
                return self.paid((*text_of_value(one), Piece("/"), *text_of_value(other)))
            return self.unknown(node)
        return self.number(node, one, operator, other)

    def number(self, node: ast.AST, one: Any, operator: ast.operator, other: Any) -> Any:
        compute = ARITHMETIC.get(type(operator))
        if compute is None or not all(isinstance(value, int | float) for value in (one, other)):
            return self.unknown(node)
        try:
            value = compute(one, other)
        except ArithmeticError:
            return self.unknown(node)
        return value if abs(value) < LARGEST else self.unknown(node)

    def visit_List(self, node: ast.List) -> Any:
        return (
            self.unknown(node)
            if any(isinstance(one, ast.Starred) for one in node.elts)
            else self.all(node.elts)
        )

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return self.all(node.elts)

    def visit_Set(self, node: ast.Set) -> Any:
        return self.all(node.elts)

    def all(self, nodes: Sequence[ast.expr]) -> list[Any]:
        return [self.visit(one) for one in nodes]

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        return self.comprehended(node, node.elt, node.generators)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> Any:
        return self.comprehended(node, node.elt, node.generators)

    def comprehended(self, node: ast.expr, element: ast.expr, generators: Sequence[ast.comprehension]) -> Any:
        values = self.visit(generators[0].iter)
        plain = (
            len(generators) == 1
            and not generators[0].ifs
            and isinstance(values, list)
            and len(values) <= LOOPS
        )
        if not plain:
            return self.unknown(node)
        found = []
        for value in values:
            self.assign(generators[0].target, value)
            found.append(self.visit(element))
        return found

    def visit_Dict(self, node: ast.Dict) -> Any:
        keys = [None if key is None else known(text_of_value(self.visit(key))) for key in node.keys]
        values = self.all(node.values)
        return self.unknown(node) if None in keys else dict(zip(keys, values, strict=True))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        owner, key = self.visit(node.value), self.visit(node.slice)
        if isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
            return owner[key]
        if isinstance(owner, dict):
            return owner.get(known(text_of_value(key)), self.unknown(node))
        return self.unknown(node)

    # Calls.

    def visit_Call(self, node: ast.Call) -> Any:
        given = [self.visit(one) for one in node.args if not isinstance(one, ast.Starred)]
        named = {one.arg: self.visit(one.value) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Attribute):
            return self.called_on(node, node.func, given, named)
        target = self.visit(node.func)
        if isinstance(target, Bound):
            return self.call(target, given, named)
        return self.foreign(node, _name(node.func), given, named)

    def called_on(
        self, node: ast.Call, function: ast.Attribute, given: list[Any], named: dict[str, Any]
    ) -> Any:
        owner = self.visit(function.value)
        name = function.attr
        if isinstance(owner, Record):
            method = self.method(owner, name)
            if method is not None:
                return self.call(method, [owner, *given], named)
            if name == "write" and "path" in owner.fields and given:
                self.write(owner.fields["path"], given[0])
        if isinstance(owner, list) and name in ("append", "extend") and given:
            added = given[:1] if name == "append" else given[0]
            value = owner + added if isinstance(added, list) else self.unknown(node)
            self.assign(function.value, value)
        if isinstance(owner, tuple):
            return self.of_text(node, owner, name, given)
        return self.foreign(node, name, given, named)

    def of_text(self, node: ast.Call, owner: Text, name: str, given: list[Any]) -> Any:
        """A method of a text or of a path."""
        said = known(owner)
        if name == "join" and given and isinstance(given[0], list) and said is not None:
            parts = [piece for one in given[0] for piece in (*text_of_value(one), Piece(said))]
            return self.paid(tuple(parts[:-1]))
        if name == "write_text" and given:
            self.write(owner, given[0])
        if name in KEEPS and not given and (said is not None or name == "strip"):
            return self.paid(stripped(owner, KEEPS[name]))
        if name in ("startswith", "endswith") and said is not None and given:
            other = known(given[0]) if isinstance(given[0], tuple) else None
            return self.unknown(node) if other is None else getattr(said, name)(other)
        return self.unknown(node)

    def write(self, path: Any, value: Any) -> None:
        before = self.reading.files.get(shown_value(path), ())
        self.reading.files[shown_value(path)] = self.paid(before + text_of_value(value))

    def call(self, bound: Bound, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if isinstance(bound.node, ast.ClassDef):
            return self.instance(bound.node, given, named)
        self.depth += 1
        if self.depth > DEEPEST:
            raise ConfigError(f"functions call each other more than {DEEPEST} levels deep")
        outer, returns = self.locals, self.returns
        self.locals, self.returns = self.parameters(bound.node, given, named), []
        try:
            ended = self.attempt(lambda: self.block(bound.node.body))
            if isinstance(ended, _Raised):
                if not self.returns:
                    raise ended
                ended = _Returned(self.returns.pop()[1])
            value = ended.value if isinstance(ended, _Returned) else None
            for branch, earlier in reversed(self.returns):
                value = self.either(earlier, value, branch)
            return value
        finally:
            self.locals, self.returns = outer, returns
            self.depth -= 1

    def parameters(
        self, node: ast.FunctionDef, given: Sequence[Any], named: Mapping[str, Any]
    ) -> dict[str, Any]:
        listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        found: dict[str, Any] = {}
        defaults = dict(
            zip([one.arg for one in node.args.args[::-1]], node.args.defaults[::-1], strict=False)
        )
        defaults |= {
            one.arg: value
            for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if value
        }
        for index, parameter in enumerate(listed):
            if index < len(given):
                found[parameter.arg] = given[index]
            elif parameter.arg in named:
                found[parameter.arg] = named[parameter.arg]
            else:
                found[parameter.arg] = self.left_out(parameter, defaults.get(parameter.arg))
        return found

    def left_out(self, parameter: ast.arg, default: ast.expr | None) -> Any:
        """A parameter that nobody gives: its default, or the dataclass that the command line fills."""
        if default is not None:
            return self.visit(default)
        kind = self.globals.get(_name(parameter.annotation)) if parameter.annotation is not None else None
        if isinstance(kind, Bound) and isinstance(kind.node, ast.ClassDef):
            return self.instance(kind.node, [], self.from_options(kind.node))
        return Unknown(parameter.arg, parameter.lineno)

    def instance(self, node: ast.ClassDef, given: Sequence[Any], named: Mapping[str, Any]) -> Record:
        record = Record({}, node)
        self.records.append(record)
        fields = self.fields(node)
        record.fields.update(self.of_miles(node))
        record.fields.update({name: self.default(value) for name, value in fields.items()})
        record.fields.update(zip(fields, given, strict=False))
        record.fields.update(named)
        after = self.method(record, "__post_init__")
        if after is not None:
            self.call(after, [record], {})
        return record

    def of_miles(self, node: ast.ClassDef) -> dict[str, Any]:
        """What a launcher has from Miles's own dataclass, by its defaults at 31f1ca9."""
        bases = [_name(base) for part in self.lineage(node) for base in part.bases]
        if BASE_OF_MILES not in bases:
            return {}
        self.reading.assume("SLURM_JOB_NUM_NODES is not set")
        return {
            "num_nodes": 1,
            "cuda_core_dump": False,
            "extra_env_vars": (),
            "output_dir": literal("/root/shared_data", (0, 0)),
        }

    def fields(self, node: ast.ClassDef) -> dict[str, ast.expr | None]:
        """Fields of a dataclass with their defaults; those of its bases come first."""
        statements = [one for part in reversed(list(self.lineage(node))) for one in part.body]
        return {
            one.target.id: one.value
            for one in statements
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }

    def default(self, value: ast.expr | None) -> Any:
        if value is None:
            return Unknown("a field without default", 0)
        if isinstance(value, ast.Call) and _name(value.func) == "field":
            said = {one.arg: one.value for one in value.keywords}
            factory = said.get("default_factory")
            plain = factory.body if isinstance(factory, ast.Lambda) else said.get("default")
            return Unknown(self.said(value), value.lineno) if plain is None else self.visit(plain)
        return self.visit(value)

    def from_options(self, node: ast.ClassDef) -> dict[str, Any]:
        """The fields that the launcher's command line sets, each of the type of its default."""
        fields = self.fields(node)
        known_base = all(isinstance(base, ast.Name) for part in self.lineage(node) for base in part.bases)
        found: dict[str, Any] = {}
        fields |= dict.fromkeys(self.of_miles(node))
        for option, said in self.options.items():
            name = option.replace("-", "_")
            negated = name.removeprefix("no_")
            if name not in fields and negated in fields and said is None:
                found[negated] = False
            elif name in fields:
                found[name] = typed(said, fields[name])
            elif known_base:
                raise ConfigError(f"--{option}: no option of the launcher ({', '.join(fields)})")
        return found

    def foreign(self, node: ast.Call, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        """A call of what the launcher imports."""
        if name.startswith(STARTS):
            return self.start(node, named.get("train_args", given[0] if given else ()))
        commands = [value for value in (*given, *named.values()) if isinstance(value, tuple | list)]
        for command in commands:
            self.shell(node, command)
        if name == "run" and given and isinstance(given[0], Bound):  # typer.run(main)
            return self.call(given[0], [], {})
        rule = FOREIGN.get(name)
        return rule(self, node, given, named) if rule else self.unknown(node)

    def start(self, node: ast.Call, text: Any) -> None:
        """`execute_train(train_args=...)`, which appends the text to `python3 train.py`."""
        value = next(
            (one.value for one in node.keywords if one.arg == "train_args"),
            node.args[0] if node.args else None,
        )
        place = (self.offset(value.lineno, value.col_offset), self.offset(*_end(value))) if value else (0, 0)
        self.launch(node, (Piece("python3 train.py ", lines=_lines(node)), *text_of_value(text)), place)

    def shell(self, node: ast.Call, command: Any) -> None:
        """A command of the shell that the launcher hands on, as one text or as words."""
        if isinstance(command, list):
            words = [text_of_value(one) for one in command if isinstance(one, tuple)]
            if any(is_train(known(word) or "") for word in words):
                quoted = [piece for word in words for piece in (*quoted_text(word), Piece(" "))]
                self.launch(node, tuple(quoted), (0, 0))
        elif any(is_train(part) for piece in command for part in (piece.text or "").split()):
            self.launch(node, command, (0, 0))

    def launch(self, node: ast.Call, text: Text, place: tuple[int, int]) -> None:
        command = "".join(HOLE if piece.text is None else piece.text for piece in text)
        for found in bash.launches(command, self.path, self.reading):
            words = tuple(with_places(found.words, text))
            branch = self.branch or found.branch
            self.found.append(
                Launch(node.lineno, words, frozenset(self.hosts), place, branch, in_python=True)
            )

    # Helpers.

    def unknown(self, node: ast.AST) -> Unknown:
        return Unknown(self.said(node), getattr(node, "lineno", COMMAND_LINE))

    def said(self, node: ast.AST) -> str:
        """What the launcher says in a place, on one line."""
        said = ast.get_source_segment(self.script, node) if isinstance(node, ast.expr | ast.pattern) else None
        return " ".join((said or type(node).__name__).split())[:200]

    def paid(self, text: Text) -> Text:
        self.reading.spend(1 + sum(1 + len(piece.text or "") for piece in text))
        return text

    def offset(self, line: int, column: int) -> int:
        """The byte of a place in the launcher."""
        return self.starts[line - 1] + column


def _line_ends(script: str) -> Iterator[int]:
    place = 0
    for line in script.splitlines(keepends=True):
        place += len(line.encode())
        yield place


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _lines(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _name(node: ast.expr | None) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _options(arguments: Sequence[str]) -> tuple[str | None, dict[str, str | None]]:
    """The command and the options of a launcher's command line; an option without a value is None."""
    command, found = None, {}
    listed = list(arguments)
    while listed:
        word = listed.pop(0)
        if not word.startswith("--"):
            command = command or word
            continue
        name, equals, value = word[2:].partition("=")
        takes = not equals and listed and (not listed[0].startswith("--") or " " in listed[0])
        found[name] = value if equals else listed.pop(0) if takes else None
    return command, found


def _encoded(launcher: Launcher, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
    """Miles's `encode_pseudo_file`: a path that holds the text of a file."""
    text = text_of_value(given[0]) if given else ()
    said = known(text)
    if said is None:
        return (Piece(INLINE, lines=_lines(node)), Piece(None, launcher.said(node), _lines(node)))
    return launcher.paid(literal(INLINE + base64.b64encode(said.encode()).decode(), _lines(node)))


def _from_environment(launcher: Launcher, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
    """`os.environ.get(NAME, default)`; `get` of anything else is not known."""
    function = node.func
    owner = _name(function.value) if isinstance(function, ast.Attribute) else ""
    name = known(given[0]) if given and isinstance(given[0], tuple) else None
    if name is None or owner not in ("environ", "os"):
        return launcher.unknown(node)
    launcher.reading.assume(f"{name} is not set")
    return given[1] if len(given) > 1 else None


def _same(launcher: Launcher, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
    return launcher.paid(text_of_value(given[0])) if given else launcher.unknown(node)


def _dedented(launcher: Launcher, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
    said = known(text_of_value(given[0])) if given else None
    return launcher.unknown(node) if said is None else literal(textwrap.dedent(said), _lines(node))


def _quote(launcher: Launcher, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
    return launcher.paid(quoted_text(text_of_value(given[0]))) if given else launcher.unknown(node)


def _opened(launcher: Launcher, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
    return Record({"path": given[0]}, None) if given else launcher.unknown(node)


def _nothing(launcher: Launcher, node: ast.Call, given: list[Any], named: dict[str, Any]) -> Any:
    return ()


FOREIGN: dict[str, Callable[[Launcher, ast.Call, list[Any], dict[str, Any]], Any]] = {
    "encode_pseudo_file": _encoded,
    "get": _from_environment,
    "getenv": _from_environment,
    "str": _same,
    "Path": _same,
    "dedent": _dedented,
    "quote": _quote,
    "open": _opened,
    **dict.fromkeys(GIVES_NONE_OF_OURS, _nothing),
}
"""Functions that launchers import, and what they give; the value of any other is not known."""
