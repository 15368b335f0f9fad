"""Docstrings stand alone and are read in one breath: how they open, and how long their sentences are."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mis_plugins", "true_on_policy", "lab")
NAMES_NOTHING = "a pronoun names nothing: write the noun"
OPENINGS = dict.fromkeys("it its they them their theirs these those this that such his".split(), NAMES_NOTHING) | {
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
ROOMS_DONE = ("lab", "mis_plugins", "true_on_policy")


def files(path: str) -> list[Path]:
    """The Python files of a room, or one file."""
    place = ROOT / path
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def docstrings(room: str) -> Iterator[tuple[str, str]]:
    """The place of each docstring of a room, and its text."""
    for file in files(room):
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


LONGEST = 30
"""Words of a sentence."""
ENTRY = re.compile(r" {4}[\w`*.,\[\] -]+: ")
"""How an entry of Args or Raises begins; other indented lines are code."""


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring: prose and entries of Args and Raises, without tables and examples."""
    for part in re.split(r"\n\s*\n|\n(?=\s*[\w`*.,\[\] -]+: )|\n(?=\s*[*-] )", text):
        code = "" if ENTRY.match(part) else r" {4}|"
        lines = [line for line in part.splitlines() if not re.match(rf"{code}\||\S+( \S+)? {{2,}}\S", line)]
        yield from re.split(r"(?<=[.;:!?])\s+", " ".join(lines))


def too_long(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if len(sentence.split()) > LONGEST]


# What leans on a sentence before, at the head of a clause of an error or a notice.
LEANING = "it|its|they|them|their|theirs|this|that|these|those|such|the same|the others?|another|ours"
CLAUSE = re.compile(rf"(?:^|[.!?;:]\s+)(?:{LEANING})\b.{{,40}}", re.IGNORECASE)
SENTENCE = re.compile(rf"(?:^|[.!?]\s+)(?:{'|'.join(word.capitalize() for word in LEANING.split('|'))})\b.{{,40}}")
LOGGED = {"warn_once", "warning", "error", "exception", "info"}


def literals(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The string literals below a node that are no docstring, with {} for what an f-string fills in."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        yield node, "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node, node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from literals(child)


def tells(node: ast.AST) -> bool:
    """Whether a statement raises an error, or an expression logs or yields a notice."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in LOGGED
    return isinstance(node, ast.Raise | ast.Yield)


def leaning(tree: ast.Module) -> list[str]:
    """Parts of the texts of a module that mean something only after the sentence before."""
    told = {text for node in ast.walk(tree) if tells(node) for _, text in literals(node)}
    every = {text for _, text in literals(tree) if len(text.split()) > 3}
    return [
        found[0]
        for texts, pattern in ((told, CLAUSE), (every - told, SENTENCE))
        for text in sorted(texts)
        for found in pattern.finditer(text)
    ]


@pytest.mark.parametrize("room", ROOMS_DONE)
def test_docstrings_have_one_style(room: str) -> None:
    """A class lists its fields as `name: text`, without a heading; single backticks hold code."""
    assert [
        place for place, text in docstrings(room) if "Attributes:" in text or re.search(r"(?<!`)``(?!`)", text)
    ] == []


@pytest.mark.parametrize("room", ROOMS_DONE)
def test_docstrings_stand_alone(room: str) -> None:
    assert files(room), f"{room}: no such room"
    faults = [f"{place} {fault(text)}" for place, text in docstrings(room) if fault(text)]
    assert not faults, "\n".join(faults)


NOTHING = {"found", "one", "told", "said"}
"""Names of variables that say nothing: the field has a noun for each."""


def bound(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter and field of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


@pytest.mark.parametrize("room", ["mis_plugins", "true_on_policy"])
def test_names_say_what_they_hold(room: str) -> None:
    empty = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files(room)
        for line, name in bound(ast.parse(file.read_text(encoding="utf-8")))
        if name in NOTHING
    ]
    assert not empty, "name the thing: " + "\n".join(empty)


@pytest.mark.parametrize("room", ["mis_plugins", "true_on_policy"])
def test_errors_and_notices_stand_alone(room: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}: {part!r}"
        for file in files(room)
        for part in leaning(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not found, "say the noun: " + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "leans"),
    [
        ('raise ConfigError(f"{key}: it has no effect")', True),
        ('raise ConfigError(f"{key}: no effect; drop it")', False),
        ('warn_once("weight: 2. This is large")', True),
        ('logger.warning("%s: the same of %s", a, b)', True),
        ('yield f"{key}: {value} leads; those behind it follow"', True),
        ('WORDS = "One rule drops much. Such rules are rare."', True),
        ('HELP = "a factor; its estimator"', False),
        ('def told():\n    """It opens a docstring, which another test refuses."""', False),
    ],
)
def test_leaning_texts_are_seen(code: str, leans: bool) -> None:
    assert bool(leaning(ast.parse(code))) == leans


@pytest.mark.parametrize("opening", OPENINGS)
def test_openings_are_refused(opening: str) -> None:
    assert fault(f"{opening.capitalize()} rows, added up.")
    assert not fault("Rows of one micro-batch, added up.")


@pytest.mark.parametrize("room", ["mis_plugins", "true_on_policy", "lab"])
def test_sentences_are_short(room: str) -> None:
    found = [(place, one) for place, text in docstrings(room) for one in too_long(text)]
    assert not found, f"more than {LONGEST} words: " + "\n".join(f"{place}: {one}" for place, one in found)


def test_a_long_sentence_is_seen_and_a_table_is_not() -> None:
    long = " ".join(["word"] * (LONGEST + 1))
    assert too_long(f"Short.\n\n{long}.") and too_long(f"Args:\n    name: short.\n    other: {long}")
    assert too_long(f"Args:\n    name: short.\n    other: {long[:40]}\n        {long[40:]}")
    assert too_long("Args:\n    name: short.\n    other: short.") == []
    assert not too_long(f"Short.\n\n    {long}\n\n| {long} |\n")
    assert not too_long(f"{long[5:]}; {long[5:]}.")
