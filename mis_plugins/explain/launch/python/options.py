"""The command line of a launcher."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from mis_plugins.errors import ConfigError, shown
from mis_plugins.explain.launch.python.functions import BASE_OF_MILES, OF_MILES, Functions, defaults_of
from mis_plugins.explain.launch.python.values import name_of
from mis_plugins.explain.launch.words import literal

NUMBERS = {"int": (int, "a whole number"), "float": (float, "a number")}


class Options(Functions):
    """Functions that the command line of the launcher runs."""

    def run_commands(self) -> None:
        decorated = [
            command
            for command in self.globals.values()
            if isinstance(command, ast.FunctionDef) and command.decorator_list
        ]
        named = [
            command for command in decorated if {"command", "callback"} & set(map(name_of, command.decorator_list))
        ]
        commands = named or decorated
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


def _options(command: str, words: Sequence[str], kinds: Mapping[str, str], is_open: bool) -> dict[str, Any]:
    """The values that a command line sets, read as click does: what takes a value takes the next word, whatever it is.

    Args:
        kinds: the types of the options.
        is_open: whether there may be others; of those a word that begins as an option is no value.

    Raises:
        ConfigError: no such option, or a value too many or too few.
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
                raise ConfigError(f"{word}: got {shown(value)}; expected {what}") from None
    return values


def kind_of(annotation: ast.expr | None, default: ast.expr | None) -> str:
    """The type of an option by its annotation, or by its default."""
    named = [part.id for part in ast.walk(annotation or ast.Pass()) if isinstance(part, ast.Name)]
    by_default = type(default.value).__name__ if isinstance(default, ast.Constant) else "str"
    return next((name for name in named if name in ("bool", "int", "float", "str")), by_default)
