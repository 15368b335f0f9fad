"""The lines of a launch script to change, as a unified diff that `patch` takes."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mis_plugins.explain.launch.judgement import Want
from mis_plugins.explain.launch.words import Launch, Word
from mis_plugins.shared.table import printable


@dataclass(frozen=True)
class Edit:
    """Bytes of the script to replace by a text."""

    begin: int
    end: int
    text: str


def changed(script: str, wanted: Sequence[tuple[Launch, Sequence[Want]]]) -> str | None:
    """The script with the flags that its starts of train.py lack; None where they cannot be written into it.

    A value that the script says as one literal is replaced there. Other flags are written behind the last one, where
    argparse lets them win.
    """
    edits: set[Edit] = set()
    for launch, wants in wanted:
        found = [(want, _in_place(script, want)) for want in wants]
        edits |= {edit for _, edit in found if edit is not None}
        left = [want for want, edit in found if edit is None]
        if left and launch.place == (0, 0):
            return None
        if left:
            edits |= set((_appended_python if launch.in_python else _appended_bash)(script, launch, left))
    return _applied(script, edits)


def diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, name, n=3
    )
    return "".join(_line(line) for line in lines).rstrip("\n")


def _line(line: str) -> str:
    said = "\t".join(map(printable, line.rstrip("\n").split("\t")))
    return f"{said}\n" if line.endswith("\n") else f"{said}\n\\ No newline at end of file\n"


def _in_place(script: str, want: Want) -> Edit | None:
    word = want.instead
    new = want.value if want.value is not None else want.flag
    if word is None:
        return None
    return Edit(*word.span, _quoted(new)) if word.span is not None else _literal(script, word, new)


def _literal(script: str, word: Word, new: str) -> Edit | None:
    """The only place among the word's lines that says it."""
    lines = script.splitlines(keepends=True)
    first, last = word.lines
    within = "".join(lines[first - 1 : last])
    if not first or not word.is_known or within.count(word.text) != 1:
        return None
    begin = len("".join([*lines[: first - 1], within[: within.index(word.text)]]).encode())
    return Edit(begin, begin + len(word.text.encode()), new)


def _said(want: Want) -> str:
    """A flag as a shell takes it."""
    return want.flag if want.value is None else f"{want.flag} {_quoted(want.value)}"


def _quoted(text: str) -> str:
    """One word for a shell, which still runs the command of `$(...)`."""
    return f'"{text}"' if text.startswith("$(") else shlex.quote(text)


def _appended_bash(script: str, launch: Launch, wants: Sequence[Want]) -> Iterator[Edit]:
    """Lines behind the last argument of the command, with the blanks before it."""
    end = launch.place[1]
    line = script.encode()[:end].decode(errors="replace").rpartition("\n")[2]
    indent = line[: len(line) - len(line.lstrip())] or "    "
    yield Edit(end, end, "".join(f" \\\n{indent}{_said(want)}" for want in wants))


def _appended_python(script: str, launch: Launch, wants: Sequence[Want]) -> Iterator[Edit]:
    """`train_args=EXPRESSION + " FLAGS "`."""
    begin, end = launch.place
    source = script.encode()
    line = source[:begin].decode(errors="replace").rpartition("\n")[2]
    indent = line[: len(line) - len(line.lstrip())]
    texts = [f" {_said(want)}" for want in wants]
    added = "".join(f"\n{indent}+ " + (repr(text) if '"' in text else f'"{text}"') for text in texts)
    is_name = source[begin:end].decode(errors="replace").isidentifier()
    yield Edit(end, end, added if is_name else f"){added}")
    if not is_name:
        yield Edit(begin, begin, "(")


def _applied(script: str, edits: Collection[Edit]) -> str:
    source = script.encode()
    for edit in sorted(edits, key=lambda edit: edit.begin, reverse=True):
        source = source[: edit.begin] + edit.text.encode() + source[edit.end :]
    return source.decode()
