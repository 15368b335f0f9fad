"""Values of a launcher in Python as far as they are known, and what comparing or printing them gives."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.explain.launch.words import COMMAND_LINE, Piece, Text, known, literal

LARGEST = 2**63  # of a number; a power would fill the memory


@dataclass(frozen=True)
class Unknown:
    """A value that only running the launcher would tell."""

    source: str
    line: int


@dataclass
class Record:
    """An object of a dataclass of the launcher."""

    fields: dict[str, Any]
    node: ast.ClassDef | None


@dataclass(frozen=True)
class Bound:
    """A function or class of the launcher."""

    node: ast.FunctionDef | ast.ClassDef


def typed(said: str | None, default: ast.expr | None) -> Any:
    plain = default.value if isinstance(default, ast.Constant) else None
    if said is None:
        return True
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        try:
            return type(plain)(said)
        except ValueError:
            raise ConfigError(f"{said}: no number, as {plain} is") from None
    return literal(said, (COMMAND_LINE, COMMAND_LINE))


def text_of_value(value: Any, lines: tuple[int, int] = (COMMAND_LINE, COMMAND_LINE)) -> Text:
    """A value as an f-string shows it."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Unknown):
        return (Piece(None, value.source, (value.line, value.line)),)
    if value is None or isinstance(value, bool | int | float):
        return literal(str(value), lines)
    return (Piece(None, "a value that is no text", lines),)


def shown_value(value: Any) -> str:
    return "".join(piece.source if piece.text is None else piece.text for piece in text_of_value(value))


def quoted_text(text: Text) -> Text:
    """A word as a shell would have to be given it."""
    return (Piece("'"), *text, Piece("'"))


def stripped(text: Text, change: Callable[[str], str]) -> Text:
    """A text whose parts are all known, or whose ends are, without blanks around it."""
    said = known(text)
    lines = text[0].lines if text else (COMMAND_LINE, COMMAND_LINE)
    if said is not None:
        return literal(change(said), lines)
    first, *middle, last = text if len(text) > 1 else (*text, Piece(""))
    ends = [
        Piece(piece.text and cut(piece.text), piece.source, piece.lines, piece.branch)
        for piece, cut in ((first, str.lstrip), (last, str.rstrip))
    ]
    return (ends[0], *middle, ends[1])


def truth_of(value: Any) -> bool | None:
    """Whether a value counts as true; None where it is not known."""
    if isinstance(value, tuple):
        said = known(value)
        sure = any(piece.text and not piece.branch for piece in value)
        return True if sure else None if said is None else said != ""
    if value is None or isinstance(value, bool | int | float | list | dict):
        return bool(value)
    return None


def equal(one: Any, other: Any) -> bool | None:
    if isinstance(one, Unknown | Record) or isinstance(other, Unknown | Record):
        return None
    if isinstance(one, tuple) and isinstance(other, tuple):
        left, right = known(one), known(other)
        return None if left is None or right is None else left == right
    return type(one) is type(other) and one == other


def any_of(found: Sequence[bool | None]) -> bool | None:
    return True if True in found else None if None in found else False


def compared(one: Any, operator: ast.cmpop, other: Any) -> bool | None:
    if isinstance(operator, ast.Eq | ast.Is):
        return equal(one, other)
    if isinstance(operator, ast.NotEq | ast.IsNot):
        found = equal(one, other)
        return None if found is None else not found
    if isinstance(operator, ast.In | ast.NotIn) and isinstance(other, list | dict):
        keys = [literal(key, (0, 0)) for key in other] if isinstance(other, dict) else other
        found = any_of([equal(one, key) for key in keys])
        return None if found is None else found == isinstance(operator, ast.In)
    compare = ORDER.get(type(operator))
    numbers = all(isinstance(value, int | float) for value in (one, other))
    return compare(one, other) if compare and numbers else None


ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: lambda one, other: one < other,
    ast.LtE: lambda one, other: one <= other,
    ast.Gt: lambda one, other: one > other,
    ast.GtE: lambda one, other: one >= other,
}


ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda one, other: one + other,
    ast.Sub: lambda one, other: one - other,
    ast.Mult: lambda one, other: one * other,
    ast.Div: lambda one, other: one / other,
    ast.FloorDiv: lambda one, other: one // other,
    ast.Mod: lambda one, other: one % other,
}
