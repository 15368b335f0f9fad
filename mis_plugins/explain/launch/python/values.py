"""Values of a launcher, and what its places are called.

A value is a `Text`, a number, a bool, None, a list, a dict, a `Record`, or the node of a function or class of the
launcher. A value that only running the launcher would tell is a text with a piece that is not known.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from mis_plugins.explain.launch.reader import Ended
from mis_plugins.explain.launch.words import Lines, Text, hole, known, literal, shown

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


def says(node: ast.AST) -> str:
    """What the launcher says in a place, on one line."""
    return " ".join(ast.unparse(node).split())[:200]


def lines_of(node: ast.AST) -> Lines:
    first = getattr(node, "lineno", 0)
    return first, getattr(node, "end_lineno", None) or first


def place_of(node: ast.expr) -> str:
    return f"{node.lineno}:{node.col_offset}"


def name_of(node: ast.expr | None) -> str:
    """The last part of a dotted name."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def names_set(*nodes: ast.AST) -> list[str]:
    """The names that some parts set, but for those that they only add to."""
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
