"""`config check SCRIPT`: what a launch script would load, and the lines to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mis_plugins.config.file import text_of
from mis_plugins.config.loading import read_keys
from mis_plugins.errors import ConfigError, UserError
from mis_plugins.explain.launch import bash, change, python
from mis_plugins.explain.launch.judgement import Judgement, arguments, judge
from mis_plugins.explain.launch.words import Launch, Reading
from mis_plugins.hosts import checks
from mis_plugins.hosts.host import Host
from mis_plugins.shared.shell import REFUSED
from mis_plugins.shared.table import printable

READERS = {".sh": bash.launches, ".py": python.launches}
DIFFERENT = 1
Tell = Callable[[Mapping[str, Any], Host | None, str], str]


def is_script(target: str) -> bool:
    return Path(target).suffix in READERS


def check(
    target: str, given: Sequence[str], host: Host | None, preset: str | None, tell: Tell
) -> tuple[str, int]:
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
    found, reading = _read(script, path, given)
    judged = [(launch, judge(launch, reading, path, host, preset)) for launch in found]
    parts = ["\n".join(_told(launch, judgement, tell)) for launch, judgement in judged]
    parts += _notes(reading)
    if any(judgement.unsure for _, judgement in judged):
        parts.append(
            "nothing is proposed as long as that is unsure; behind -- stands what you start the script with"
        )
        return "\n\n".join(parts), REFUSED
    if not any(judgement.wants for _, judgement in judged):
        return "\n\n".join([*parts, "nothing has to change"]), 0
    after = change.changed(script, [(launch, judgement.wants) for launch, judgement in judged])
    if after is None or not _holds(after, path, given, host, preset):
        parts.append(
            "no diff: the flags come together in a way that could not be changed here; add them by hand"
        )
    else:
        parts.append(change.diff(script, after, str(path)))
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
    yield from (printable(line) for line in judgement.told)
    yield from (printable(f"unsure: {text}") for text in judgement.unsure)
    if judgement.keys is not None:
        yield tell(judgement.keys, judgement.host, printable(judgement.source or ""))
        yield from _beside(launch, judgement)
    yield from (
        printable(f"change: {want.flag}{f' {want.value}' if want.value else ''}: {want.why}")
        for want in judgement.wants
    )


def _holds(after: str, path: Path, given: Sequence[str], host: Host | None, preset: str | None) -> bool:
    """Whether the changed script, read again, lacks nothing."""
    try:
        found, reading = _read(after, path, given)
        judged = [judge(launch, reading, path, host, preset) for launch in found]
    except UserError:
        return False
    return not any(one.wants or one.unsure for one in judged)


def _beside(launch: Launch, judgement: Judgement) -> Iterator[str]:
    """Conflicts of the command's flags with the config; one that spoils the numbers raises."""
    host, own = judgement.host, judgement.keys or {}
    if host is not None:
        keys, config = {**arguments(launch, host), **own}, read_keys(own)
        checks.refuse("command", keys, config, host)
        yield from (f"warning: {text}" for text in checks.warnings("command", keys, config, host))


def _notes(reading: Reading) -> list[str]:
    lines = [
        f"not read: line {line}: {text}" if line else f"not read: {text}"
        for line, text in reading.unread.items()
    ]
    if reading.assumed:
        lines.append(f"taken for granted: {', '.join(reading.assumed)}")
    return ["\n".join(map(printable, lines))] if lines else []
