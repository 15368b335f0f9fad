"""Docstrings stand alone: none opens with a word whose meaning lies in the docstring before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mis_plugins", "true_on_policy", "benchmarks")
NAMES_NOTHING = "a pronoun names nothing: write the noun"
OPENINGS = dict.fromkeys(
    "it its they them their theirs these those this that such his".split(), NAMES_NOTHING
) | {
    "the same": "says how two things agree, not what one of them is",
    "the other": "leans on the thing named before",
    "the others": "leans on the things named before",
    "another": "leans on the thing named before",
    "of": "half a phrase: begin with the thing that is of something",
    "as": "a comparison before its subject",
    "both": "counts two things that are named elsewhere",
    "also": "adds to the docstring before",
    "and": "continues the docstring before",
    "but": "continues the docstring before",
    "or": "continues the docstring before",
    "within": "half a phrase: say what happens there",
    "without": "half a phrase: say what happens then",
    "not": "denies the docstring before",
    "needs": "a verb without its subject",
    "whose": "a question about a noun named elsewhere",
    "ours": NAMES_NOTHING,
    "there": "points to a place named elsewhere",
    "here": "points to a place named elsewhere",
    "else": "continues the docstring before",
    "otherwise": "continues the docstring before",
}
# Rooms and files whose docstrings stand alone, by path; a package stands here once all of its rooms do.
ROOMS_DONE = ("benchmarks", "mis_plugins", "true_on_policy")


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """The place of each docstring of a file, and its text."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if text := ast.get_docstring(node):
            yield f"{file.relative_to(ROOT)}:{getattr(node, 'name', 'module')}", text


def fault(text: str) -> str | None:
    """Why the opening of a docstring is refused, or None."""
    words = [word.strip(",.:;") for word in text.lower().split()[:2]]
    found = OPENINGS.get(" ".join(words)) or OPENINGS.get(words[0])
    return found and f"opens with {text.splitlines()[0][:40]!r}: {found}"


def files(path: str) -> list[Path]:
    """The Python files of a room, or one file."""
    place = ROOT / path
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS_DONE)
def test_docstrings_stand_alone(room: str) -> None:
    assert files(room), f"{room}: no such room"
    faults = [
        f"{place} {fault(text)}" for file in files(room) for place, text in docstrings(file) if fault(text)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("opening", OPENINGS)
def test_openings_are_refused(opening: str) -> None:
    assert fault(f"{opening.capitalize()} rows, added up.")
    assert not fault("Rows of one micro-batch, added up.")
