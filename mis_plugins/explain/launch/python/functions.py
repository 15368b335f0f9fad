"""Functions and classes of a launcher: what a call of them gives, and what its command line sets."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from mis_plugins import errors
from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch.python.values import Record, Values, lines_of, name_of, says
from mis_plugins.explain.launch.reader import Ended, Joined, Returned
from mis_plugins.explain.launch.words import hole, literal

BASE_OF_MILES = "ExecuteTrainConfig"
OF_MILES = {"num_nodes": 1, "cuda_core_dump": False, "extra_env_vars": (), "output_dir": literal("/root/shared_data")}
"""What a launcher has from Miles's own dataclass, by its defaults at 31f1ca9."""
CHANGES_FIELDS = ("__setattr__", "__getattribute__", "__str__", "__format__")
NUMBERS = {"int": (int, "a whole number"), "float": (float, "a number")}
DECORATES = {"dataclass", "command", "callback", "dataclass_cli", "property", "staticmethod", "classmethod"}


class Functions(Values):
    """What calls of the functions and classes of the launcher give; its command line runs one."""

    def define(self, node: ast.FunctionDef) -> None:
        """Defaults have the values that their names have where the function is defined."""
        self.enclosing[node] = [*self.around, *self.frames[1:][-1:]]
        self.kept += [scope for scope in self.enclosing[node] if not any(scope is kept for kept in self.kept)]
        self.keep_defaults(default for _, default in defaults_of(node))

    def keep_defaults(self, defaults: Iterable[ast.expr | None]) -> None:
        self.defaults |= {place_of(default): self.visit(default) for default in defaults if default is not None}

    def call(self, node: ast.FunctionDef, given: Sequence[Any], named: Mapping[str, Any], is_sure: bool = True) -> Any:
        """The value of a call, which gives further arguments where it is not sure that those are all."""
        self.called.add(node.args)
        with self.deeper(), self.now(running=self.running | {node.args}):
            frames, around = [*self.frames, self.parameters(node, given, named, is_sure)], self.enclosing.get(node, [])
            with self.now(frames=frames, returned=[], outside={}, around=around):
                value = self.ended_by(self.attempt(lambda: self.block(node.body)))
        yields = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node))  # and returns no value
        return value if decorators(node) <= DECORATES and not yields else self.unknown(node, value)

    def may_run(self, function: ast.FunctionDef, given: Sequence[Any] = (), **named: Any) -> None:
        if function.args not in self.running:
            call = partial(self.call, function, given, named, is_sure=False)  # with more arguments, or not at all
            self.fork(self.handing or f"something calls {function.name}", call, lambda: None)

    def ended_by(self, ended: Ended | None) -> Any:
        """What a function gives back over all ways in which it may end; the names that it sets hold what all leave."""
        value = None
        if isinstance(ended, Returned):
            value = ended.value[0]
        elif ended is not None and not self.returned:
            raise ended
        elif ended is not None:  # one way ends the launcher
            value, state = self.returned.pop()[1]
            self._restore(state)
        for branch, (earlier, state) in reversed(self.returned):
            value, joined = self.either(earlier, value, branch), Joined()
            for scope, names in zip(self.scopes(), state, strict=False):
                self.join(names, scope, branch, joined)
        return value

    def parameters(
        self, node: ast.FunctionDef, given: Sequence[Any], named: Mapping[str, Any], is_sure: bool
    ) -> dict[str, Any]:
        """The names of a function's parameters with their values."""
        asked, plain = node.args, [parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args)]
        values = dict(zip(plain, given, strict=False))
        for parameter, default in defaults_of(node):
            if parameter.arg in named:
                values[parameter.arg] = named[parameter.arg]
            elif parameter.arg not in values:
                values[parameter.arg] = self.left_out(parameter, default) if is_sure else hole(parameter.arg)
        if asked.vararg is not None:
            values[asked.vararg.arg] = list(given[len(plain) :]) if is_sure else hole(asked.vararg.arg)
        if asked.kwarg is not None:
            more = {name: value for name, value in named.items() if name not in values}
            values[asked.kwarg.arg] = more if is_sure else hole(asked.kwarg.arg)
        return values

    def left_out(self, parameter: ast.arg, default: ast.expr | None) -> Any:
        """A parameter that nobody gives: its default, or the dataclass that the command line fills."""
        if default is not None:
            return self.defaults.get(place_of(default), hole(says(default), lines_of(default)))
        kind = self.globals.get(name_of(parameter.annotation))
        if isinstance(kind, ast.ClassDef):
            return self.instance(kind, [], self.of_fields or {})
        return hole(parameter.arg, lines_of(parameter))

    def instance(self, node: ast.ClassDef, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """An object of a class; not known where the class has a say in what its fields hold."""
        methods = [part for kind in self.lineage(node) for part in kind.body if isinstance(part, ast.FunctionDef)]
        if any("setter" in decorators(method) or method.name in CHANGES_FIELDS for method in methods):
            return self.unknown(node, *given, *named.values())
        record = Record({}, node)
        self.kept.append(record.fields)
        fields = self.fields(node)
        if BASE_OF_MILES in self.bases(node):
            self.reading.assume_unset("SLURM_JOB_NUM_NODES")
            record.fields |= OF_MILES
        record.fields |= {name: self.default(field.value) for name, field in fields.items()}
        if made := self.method(node, "__init__"):
            self.call(made, [record, *given], named)
            return record
        record.fields |= dict(zip(fields, given, strict=False)) | dict(named)
        if after := self.method(node, "__post_init__"):
            self.call(after, [record], {})
        return record

    def fields(self, node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
        """Fields of a dataclass as they are declared; those that it inherits from elsewhere are not known."""
        parts = [part for kind in reversed(self.lineage(node)) for part in kind.body]
        declared = [statement for statement in parts if isinstance(statement, ast.AnnAssign)]
        return {statement.target.id: statement for statement in declared if isinstance(statement.target, ast.Name)}

    def default(self, value: ast.expr | None) -> Any:
        if value is None:
            return hole("a field without default")
        if isinstance(value, ast.Call) and name_of(value.func) == "field":
            keywords = {keyword.arg: keyword.value for keyword in value.keywords}
            factory = keywords.get("default_factory")
            plain = factory.body if isinstance(factory, ast.Lambda) else keywords.get("default")
            return self.unknown(value) if plain is None else self.visit(plain)
        return self.defaults.get(place_of(value), self.unknown(value))

    def bases(self, node: ast.ClassDef) -> set[str]:
        """The names of the classes that a class inherits from and that the launcher does not define."""
        names = {name_of(base) for kind in self.lineage(node) for base in kind.bases}
        return {name for name in names if not isinstance(self.globals.get(name), ast.ClassDef)}

    def method(self, node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
        parts = (part for kind in self.lineage(node) for part in reversed(kind.body))
        return next((part for part in parts if isinstance(part, ast.FunctionDef) and part.name == name), None)

    def lineage(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """A class of the launcher and those that it inherits from, the nearest first."""
        bases = [self.globals.get(name_of(base)) for base in node.bases]
        return [node, *(kind for base in bases if isinstance(base, ast.ClassDef) for kind in self.lineage(base))]

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """A field, or what a property gives; a method of a list or object may be called where it is not seen."""
        owner = self.visit(node.value)
        if not isinstance(owner, Record):
            return self.unknown(node, *([owner] if isinstance(owner, list | dict) else self.parts(owner)))
        if node.attr in owner.fields:
            return owner.fields[node.attr]
        method = self.method(owner.node, node.attr)
        if method and "property" in decorators(method):
            return self.call(method, [owner], {})
        return self.unknown(node, *([owner] if method or node.attr.startswith("__") else ()))

    def run_commands(self) -> None:
        functions = [value for value in self.globals.values() if isinstance(value, ast.FunctionDef)]
        named = [function for function in functions if decorators(function) & {"command", "callback"}]
        commands = named or [function for function in functions if function.decorator_list]
        asked = (self.command or "").replace("-", "_")
        for node in [command for command in commands if command.name == asked] or commands:
            self.attempt(lambda node=node: self.command_line(node))

    def command_line(self, node: ast.FunctionDef) -> Any:
        """Call the function that the launcher's command line runs, with what it sets."""
        own, fields, others = dict[str, str](), dict[str, str](), set[str]()
        for parameter, default in defaults_of(node):
            kind = self.globals.get(name_of(parameter.annotation))
            if isinstance(kind, ast.ClassDef):
                fields |= self.kinds(kind)
                others |= self.bases(kind) - {BASE_OF_MILES}
            else:
                own[parameter.arg] = kind_of(parameter.annotation, default)
        values = _options(node.name, self.options, own | fields, bool(others))
        self.of_fields = {name: value for name, value in values.items() if name not in own}
        if more := [f"--{name}" for name in self.of_fields if name not in fields]:
            self.reading.unread[0] = f"{', '.join(more)}: {' or '.join(sorted(others))} may have the option"
        return self.call(node, [], {name: value for name, value in values.items() if name in own})

    def kinds(self, node: ast.ClassDef) -> dict[str, str]:
        """The types of a dataclass's fields."""
        inherited = {name: type(value).__name__ for name, value in OF_MILES.items()}
        own = {name: kind_of(field.annotation, field.value) for name, field in self.fields(node).items()}
        return (inherited if BASE_OF_MILES in self.bases(node) else {}) | own


def defaults_of(node: ast.FunctionDef) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """The parameters of a function, each with its default."""
    plain = [*node.args.posonlyargs, *node.args.args]
    defaults = [*[None] * (len(plain) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
    return zip([*plain, *node.args.kwonlyargs], defaults, strict=True)


def _options(command: str, words: Sequence[str], kinds: Mapping[str, str], is_open: bool) -> dict[str, Any]:
    """The values that a command line sets, read as click does: what takes a value takes the next word, whatever it is.

    With `is_open` there may be options beside those of `kinds`; of those a word that begins as an option is no value.
    """
    values: dict[str, Any] = {}
    listed = list(words)
    while listed:
        word = listed.pop(0)
        option, equals, text = word.partition("=")
        name = option[2:].replace("-", "_")
        kind, negated = kinds.get(name), name.removeprefix("no_")
        is_switch = kind == "bool" or kind is None and kinds.get(negated) == "bool"
        if option[:2] != "--" or kind is None and not is_switch and not is_open:
            raise ConfigError(f"{word}: no option of {command} ({', '.join(kinds)})")
        if is_switch and not equals:
            values[name if kind else negated] = bool(kind)
        elif kind is None and not is_switch and not equals and (not listed or listed[0].startswith("--")):
            values[name] = True
        elif is_switch or not equals and not listed:
            raise ConfigError(f"{word}: the option {'takes no' if is_switch else 'lacks its'} value")
        else:
            value = text if equals else listed.pop(0)
            make, what = NUMBERS.get(kind or "", (literal, ""))
            try:
                values[name] = make(value)
            except ValueError:
                raise ConfigError(f"{word}: got {errors.shown(value)}; expected {what}") from None
    return values


def kind_of(annotation: ast.expr | None, default: ast.expr | None) -> str:
    """The type of an option by its annotation, or by its default."""
    named = [part.id for part in ast.walk(annotation or ast.Pass()) if isinstance(part, ast.Name)]
    by_default = type(default.value).__name__ if isinstance(default, ast.Constant) else "str"
    return next((name for name in named if name in ("bool", "int", "float", "str")), by_default)


def place_of(node: ast.expr) -> str:
    return f"{node.lineno}:{node.col_offset}"


def decorators(node: ast.FunctionDef) -> set[str]:
    return set(map(name_of, node.decorator_list))
