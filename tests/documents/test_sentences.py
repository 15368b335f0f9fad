"""Docstrings stand alone and are read in one breath: how they open, and how long their sentences are."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
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


@cache
def trees(package: str) -> dict[str, ast.Module]:
    """The modules of a package, by their paths."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """The place of each docstring of a package, and its text."""
    for path, tree in trees(package).items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if text := ast.get_docstring(node):
                yield f"{path}:{getattr(node, 'name', 'module')}", text


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


def other_style(text: str) -> bool:
    """Whether a docstring lists fields under a heading, and not as `name: text`, or has double backticks."""
    return "Attributes:" in text or re.search(r"(?<!`)``(?!`)", text) is not None


@pytest.mark.parametrize("fault_of", [other_style, fault, too_long])
@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_have_one_style_stand_alone_and_are_short(
    package: str, fault_of: Callable[[str], str | list[str] | bool | None]
) -> None:
    assert trees(package), f"{package}: no such package"
    faults = [f"{place}: {found}" for place, text in docstrings(package) if (found := fault_of(text))]
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


def empty_names(tree: ast.Module) -> list[str]:
    """The variables of a module that say nothing, with their lines."""
    return [f"line {line}: {name}" for line, name in bound(tree) if name in NOTHING]


@pytest.mark.parametrize("faults_of", [empty_names, leaning])
@pytest.mark.parametrize("package", ["mis_plugins", "true_on_policy"])
def test_names_say_what_they_hold_and_errors_and_notices_stand_alone(
    package: str, faults_of: Callable[[ast.Module], list[str]]
) -> None:
    found = [f"{path}: {part!r}" for path, tree in trees(package).items() for part in faults_of(tree)]
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


def test_a_long_sentence_is_seen_and_a_table_is_not() -> None:
    long = " ".join(["word"] * (LONGEST + 1))
    assert too_long(f"Short.\n\n{long}.") and too_long(f"Args:\n    name: short.\n    other: {long}")
    assert too_long(f"Args:\n    name: short.\n    other: {long[:40]}\n        {long[40:]}")
    assert too_long("Args:\n    name: short.\n    other: short.") == []
    assert not too_long(f"Short.\n\n    {long}\n\n| {long} |\n")
    assert not too_long(f"{long[5:]}; {long[5:]}.")
