"""`config check SCRIPT`: what a launch script would load, and the lines to change, as a diff that `patch` takes."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mis_plugins.config.file import text_of
from mis_plugins.config.loading import read_keys
from mis_plugins.errors import ConfigError, UserError
from mis_plugins.explain.launch import bash, python
from mis_plugins.explain.launch.judgement import Judgement, Want, arguments, judge
from mis_plugins.explain.launch.words import Launch, Reading
from mis_plugins.hosts import checks
from mis_plugins.hosts.host import Host
from mis_plugins.shared.shell import REFUSED
from mis_plugins.shared.terminal import printable

READERS = {".sh": bash.launches, ".py": python.launches}
DIFFERENT = 1
Tell = Callable[[Mapping[str, Any], Host | None, str], str]
Edit = tuple[int, int, str]  # bytes of the script to replace, from and up to, and the text in their place


def is_script(target: str) -> bool:
    return Path(target).suffix in READERS


def check(target: str, given: Sequence[str], host: Host | None, preset: str | None, tell: Tell) -> tuple[str, int]:
    """What a launch script would load, in words, and the exit code.

    The code is 0 where it corrects or watches with this pack, 1 where lines have to change, which a diff shows, and 2
    where the script does not tell.

    Args:
        given: what the user starts the script with.
        preset: the preset or file that shall correct, in place of the script's own config.
        tell: what a config does on a host, in words, of its keys and its name.

    Raises:
        ConfigError: no start of train.py, a script that cannot be read, or a config that the hooks would refuse.
    """
    path = Path(target)
    script = text_of(path)

    def judged(text: str) -> tuple[list[tuple[Launch, Judgement]], Reading]:
        found, reading = _read(text, path, given)
        return [(launch, judge(launch, reading, path, host, preset)) for launch in found], reading

    found, reading = judged(script)
    parts = ["\n".join(_told(launch, judgement, tell)) for launch, judgement in found]
    parts += _notes(reading)
    if any(judgement.unsure for _, judgement in found):
        parts.append("nothing is proposed as long as that is unsure; behind -- stands what you start the script with")
        return "\n\n".join(parts), REFUSED
    if not any(judgement.wants for _, judgement in found):
        return "\n\n".join([*parts, "nothing has to change"]), 0
    after = changed(script, [(launch, judgement.wants) for launch, judgement in found])
    try:
        holds = after is not None and not any(one.wants or one.unsure for _, one in judged(after)[0])
    except UserError:
        holds = False
    by_hand = "no diff: the flags come together in a way that could not be changed here; add them by hand"
    parts.append(diff(script, after, str(path)) if after is not None and holds else by_hand)
    return "\n\n".join(parts), DIFFERENT


def _read(script: str, path: Path, given: Sequence[str]) -> tuple[list[Launch], Reading]:
    """Every start of train.py, each once: a launcher may reach one by several of its commands."""
    reading = Reading(len(script.encode()), str(path))
    found = READERS[path.suffix](script, path, reading, given)
    if not found:
        raise ConfigError(
            f"no start of train.py or train_async.py could be read{reading.ended}; give the script that starts it, "
            "and behind -- what you start the script with"
        )
    return list({(launch.line, launch.words): launch for launch in found}.values()), reading


def _told(launch: Launch, judgement: Judgement, tell: Tell) -> Iterator[str]:
    yield from map(printable, [*judgement.told, *(f"unsure: {text}" for text in judgement.unsure)])
    if judgement.keys is not None:
        yield tell(judgement.keys, judgement.host, printable(judgement.source or ""))
        yield from _beside(launch, judgement)
    for want in judgement.wants:
        yield printable(f"change: {want.flag}{f' {want.value}' if want.value else ''}: {want.why}")


def _beside(launch: Launch, judgement: Judgement) -> Iterator[str]:
    """Conflicts of the command's flags with the config; one that spoils the numbers raises."""
    host, own = judgement.host, judgement.keys or {}
    if host is not None:
        keys, config = {**arguments(launch, host), **own}, read_keys(own)
        checks.refuse("command", keys, config, host)
        yield from (f"warning: {text}" for text in checks.warnings("command", keys, config, host))


def _notes(reading: Reading) -> list[str]:
    lines = [f"not read: line {line}: {text}" if line else f"not read: {text}" for line, text in reading.unread.items()]
    if reading.assumed:
        lines.append(f"taken for granted: {', '.join(reading.assumed)}")
    return ["\n".join(map(printable, lines))] if lines else []


# The lines to change.


def changed(script: str, wanted: Sequence[tuple[Launch, Sequence[Want]]]) -> str | None:
    """The script with the flags that its starts of train.py lack; None where they cannot be written into it.

    A value that the script says as one literal is replaced there. Other flags are written behind the last one, where
    argparse lets them win.
    """
    edits: set[Edit] = set()
    for launch, wants in wanted:
        found = [(want, _in_place(script, want)) for want in wants]
        edits |= {edit for _, edit in found if edit is not None}
        texts = [
            want.flag if want.value is None else f"{want.flag} {_quoted(want.value)}"
            for want, edit in found
            if edit is None
        ]
        if texts and launch.place == (0, 0):
            return None
        if texts:
            appended = _appended_python if launch.in_python else _appended_bash
            edits |= set(appended(script.encode(), *launch.place, texts))
    return _applied(script.encode(), edits)


def diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), name, name, n=3)
    return "".join(_line(line) for line in lines).rstrip("\n")


def _line(line: str) -> str:
    said = "\t".join(map(printable, line.rstrip("\n").split("\t")))
    return f"{said}\n" if line.endswith("\n") else f"{said}\n\\ No newline at end of file\n"


def _in_place(script: str, want: Want) -> Edit | None:
    """The literal that says another value, where it stands at one place among its lines alone."""
    word, new = want.instead, want.value if want.value is not None else want.flag
    if word is None or word.span is not None:
        return (*word.span, _quoted(new)) if word and word.span else None
    lines = script.splitlines(keepends=True)
    before, within = "".join(lines[: word.lines[0] - 1]), "".join(lines[word.lines[0] - 1 : word.lines[1]])
    if not word.lines[0] or not word.is_known or within.count(word.text) != 1:
        return None
    begin = len(f"{before}{within[: within.index(word.text)]}".encode())
    return begin, begin + len(word.text.encode()), new


def _quoted(text: str) -> str:
    """One word for a shell, which still runs the command of `$(...)`."""
    return f'"{text}"' if text.startswith("$(") else shlex.quote(text)


def _indent(source: bytes, end: int) -> str:
    line = source[:end].decode(errors="replace").rpartition("\n")[2]
    return line[: len(line) - len(line.lstrip())]


def _appended_bash(source: bytes, begin: int, end: int, texts: Sequence[str]) -> Iterator[Edit]:
    """Lines behind the last argument of the command, with the blanks before it."""
    indent = _indent(source, end) or "    "
    yield end, end, "".join(f" \\\n{indent}{text}" for text in texts)


def _appended_python(source: bytes, begin: int, end: int, texts: Sequence[str]) -> Iterator[Edit]:
    """`train_args=EXPRESSION + " FLAGS "`."""
    indent = _indent(source, begin)
    added = "".join(f"\n{indent}+ " + (repr(f" {text}") if '"' in text else f'" {text}"') for text in texts)
    is_name = source[begin:end].decode(errors="replace").isidentifier()
    yield end, end, added if is_name else f"){added}"
    if not is_name:
        yield begin, begin, "("


def _applied(source: bytes, edits: Collection[Edit]) -> str:
    for begin, end, text in sorted(edits, key=lambda edit: edit[0], reverse=True):
        source = source[:begin] + text.encode() + source[end:]
    return source.decode()
