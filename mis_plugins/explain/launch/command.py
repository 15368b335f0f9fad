"""`config check SCRIPT`: what a launch script would load, and the lines to change, as a diff that `patch` takes."""

import difflib
import io
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mis_plugins.config.file import text_of
from mis_plugins.config.loading import read_keys
from mis_plugins.errors import ConfigError, UserError
from mis_plugins.explain.launch import bash, python
from mis_plugins.explain.launch.judgement import Judgement, Want, arguments, judge
from mis_plugins.explain.launch.reader import PACKAGES, SCRIPTS, Launch, Reading
from mis_plugins.hosts import checks
from mis_plugins.hosts.arguments import recorded
from mis_plugins.hosts.host import Host
from mis_plugins.shared.shell import REFUSED
from mis_plugins.shared.terminal import printable

DIFFERENT = 1
BY_HAND = (
    "no diff: the flags come together in a way that could not be changed here, or in one place for several starts, of "
    "which not all lack them; add them by hand"
)
Tell = Callable[[Mapping[str, Any], Host | None, str], str]
Edit = tuple[int, int, str]  # bytes of the script to replace, from and up to, and the text in their place
Appended = Callable[[bytes, int, int, Sequence[str]], Iterator[Edit]]


def is_script(target: str) -> bool:
    return Path(target).suffix in READERS


def check(target: str, given: Sequence[str], host: Host | None, preset: str | None, tell: Tell) -> tuple[str, int]:
    """What a launch script would load, in words, and the exit code.

    The code is 0 where it corrects or watches with this pack, 1 where lines have to change, which a diff shows, and 2
    where the script does not tell. A ConfigError says that no start of train.py can be read, or that the hooks would
    refuse the config.

    Args:
        given: what the user starts the script with.
        preset: the preset or file that shall correct, in place of the script's own config.
        tell: what a config does on a host, in words, of its keys and its name.
    """
    path = Path(target)
    script = text_of(path)

    def judged(text: str) -> tuple[list[tuple[Launch, Judgement]], Reading]:
        starts, reading = _read(text, path, given)
        judgements = [judge(launch, reading, path, host, preset) for launch in starts]
        if not all(each.is_apart for each in judgements):
            judgements = [replace(each, unsure=[]) if each.is_apart else each for each in judgements]
        return list(zip(starts, judgements, strict=True)), reading

    starts, reading = judged(script)
    parts = [*dict.fromkeys("\n".join(_told(*start, tell)) for start in starts)]  # rounds of a loop may be alike
    parts += _notes(reading)
    if any(judgement.unsure for _, judgement in starts):
        parts.append("nothing is proposed as long as that is unsure; behind -- stands what you start the script with")
        return "\n\n".join(parts), REFUSED
    if not any(judgement.wants for _, judgement in starts):
        return "\n\n".join([*parts, "nothing has to change"]), 0
    after = changed(script, starts, READERS[path.suffix][1])
    try:
        holds = after is not None and not any(each.wants or each.unsure for _, each in judged(after)[0])
    except UserError:
        holds = False
    parts.append(_patch(script, after, path) if after is not None and holds else BY_HAND)
    return "\n\n".join(parts), DIFFERENT


def _read(script: str, path: Path, given: Sequence[str]) -> tuple[list[Launch], Reading]:
    """Every start of train.py, each once: a launcher may reach one by several of its commands."""
    reading = Reading(len(script.encode()), str(path))
    starts = READERS[path.suffix][0](script, path, reading, given)
    if not starts:
        unread = "; not read: ".join(["", *reading.unread.values()])
        raise ConfigError(
            f"no start of train.py or train_async.py could be read{reading.ended}; give the script that starts it, "
            f"and behind -- what you start the script with{unread}"
        )
    sure_last = sorted(starts, key=lambda launch: launch.branch is None)
    each_once = {(launch.line, launch.words): launch for launch in sure_last}.values()
    return sorted(each_once, key=starts.index), reading


def _told(launch: Launch, judgement: Judgement, tell: Tell) -> Iterator[str]:
    yield from map(printable, [*judgement.lines, *(f"unsure: {text}" for text in judgement.unsure)])
    if judgement.keys is not None:
        lines = tell(judgement.keys, judgement.host, printable(judgement.source or "")).splitlines()
        yield from dict.fromkeys([*lines, *_beside(launch, judgement)])  # both may warn of one thing
    for want in judgement.wants:
        yield printable(f"change: {want.flag}{f' {want.value}' if want.value else ''}: {want.why}")


def _beside(launch: Launch, judgement: Judgement) -> Iterator[str]:
    """Conflicts of the changed command's flags with the config; one that spoils the numbers on each host raises."""
    own = judgement.keys or {}
    wanted = {want.flag[2:].replace("-", "_"): want.value or True for want in judgement.wants}
    hosts = [judgement.host] if judgement.host else [recorded()[name] for name in sorted(PACKAGES)]
    config, refused, hosts_by_text = read_keys(own), list[ConfigError](), dict[str, list[str]]()
    for host in hosts:
        keys = {**arguments(launch, host), **wanted, **own}
        try:
            checks.refuse("command", keys, config, host)
        except ConfigError as error:
            refused.append(error)
            hosts_by_text.setdefault(f"refused: {error}", []).append(host.name)
        for text in checks.warnings("command", keys, config, host):
            hosts_by_text.setdefault(text, []).append(host.name)
    if len(refused) == len(hosts):
        raise refused[0]
    for text, names in hosts_by_text.items():
        where = "" if judgement.host else f"with --host {' or '.join(names)}: "
        yield f"warning: {where}{text}"


def _notes(reading: Reading) -> list[str]:
    lines = [f"not read: line {line}: {text}" if line else f"not read: {text}" for line, text in reading.unread.items()]
    if reading.assumed:
        lines.append(f"taken for granted: {', '.join(reading.assumed)}")
    return ["\n".join(map(printable, lines))] if lines else []


# The lines to change.


def changed(script: str, starts: Sequence[tuple[Launch, Judgement]], appended: Appended) -> str | None:
    """The script with the flags that its starts of train.py lack; None where they cannot be written into it.

    A value that the script says as one literal is replaced there. Other flags are written behind the last one, where
    argparse lets them win.
    """
    source, edits = script.encode(), set[Edit]()
    lists: dict[tuple[int, int], list[str]] = {}
    for launch, judgement in starts:
        texts = list[str]()
        for want in judgement.wants:
            edit = _in_place(script, want)
            if edit is not None:
                edits.add(edit)
            else:
                texts.append(want.flag if want.value is None else f"{want.flag} {_quoted(want.value)}")
        others = lists.setdefault(launch.place, texts) if launch.place != (0, 0) else []
        if others != texts:
            return None
        if texts:
            edits |= set(appended(source, *launch.place, texts))
    for begin, end, text in sorted(edits, key=lambda edit: edit[0], reverse=True):
        source = source[:begin] + text.encode() + source[end:]
    return source.decode()


def _patch(script: str, after: str, path: Path) -> str:
    """The diff, behind how to apply it where `patch -p0` would not take it in this folder."""
    file = path.resolve()
    is_here = not path.is_absolute() and file == Path.cwd() / path
    text = diff(script, after, str(path) if is_here else file.name)
    if script.encode() != (path.read_bytes() if path.is_file() else script.encode()) or text != printable(text, "\n\t"):
        return "no diff: lines end in CR LF, or hold what no terminal shows; save the script without, or add by hand"
    return text if is_here else f"apply it with: patch -p0 -d {shlex.quote(str(file.parent))}\n\n{text}"


def diff(before: str, after: str, name: str) -> str:
    header = f"{name}\t" if " " in name else name  # `patch` takes a name with a blank up to a tab
    lines = difflib.unified_diff(_lines(before), _lines(after), header, header, n=3)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return "".join(ended).rstrip("\n")


def _lines(text: str) -> list[str]:
    """Lines as `patch` cuts them, at line feeds alone."""
    return list(io.StringIO(text, newline="\n"))


def _in_place(script: str, want: Want) -> Edit | None:
    """The literal that says another value, where it stands at one place among its lines alone."""
    word, new = want.instead, want.value if want.value is not None else want.flag
    if word is None or word.span is not None:
        return (*word.span, _quoted(new)) if word and word.span else None
    lines = _lines(script)
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


READERS = {".py": (python.launches, _appended_python), **dict.fromkeys(SCRIPTS, (bash.launches, _appended_bash))}
"""By the end of a script's name, what reads it, and what writes flags behind others of a start."""
