"""What a figure was measured with: the command, the versions, the commits, the processor."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from mis_plugins.shared.commit import REPOSITORY, commit, git


def measured_with(
    command: str, measured: Sequence[str], checkouts: Mapping[str, Path] | None = None
) -> dict[str, str]:
    """The command, versions, commits and processor that somebody needs to repeat a figure.

    Args:
        measured: git's paths of the code that the figures follow from; uncommitted changes there are told.
        checkouts: any folder of each other repository, by the repository's name.
    """
    found = {"command": command, "python": platform.python_version(), "cpu": _cpu()}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    found["mis-plugins commit"] = commit(REPOSITORY, measured)
    return found | {f"{name} commit": commit(_top(path), (".",)) for name, path in (checkouts or {}).items()}


def as_given(program: str, words: Sequence[str]) -> str:
    """A command as it was typed, with absolute paths cut to their last part."""
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return " ".join([program, *shown])


def as_markdown(found: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in found.items() if key != "command")
    return f"```\n{found['command']}\n```\n\n| measured with | |\n|---|---|\n{rows}\n"


def committed_tree(folder: str) -> str | None:
    """Git's name of a folder's content at HEAD; None where the folder holds changes that no commit has."""
    changed = git(REPOSITORY, "status", "--porcelain", "--", folder)
    return None if changed else git(REPOSITORY, "rev-parse", "--quiet", "--verify", f"HEAD:{folder}") or None


def _top(folder: Path) -> Path:
    """Top folder of the repository that holds a folder; the folder itself where no repository does."""
    return Path(git(folder, "rev-parse", "--show-toplevel") or folder)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor() or platform.machine())}, {len(lines) and _cores(lines)} cores"


def _cores(lines: list[str]) -> int:
    return sum(line.startswith("processor") for line in lines)
