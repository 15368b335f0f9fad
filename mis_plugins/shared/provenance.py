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
    """Figures without these cannot be repeated.

    Args:
        measured: git's names of what the figures follow from; changes to it that no commit holds are said.
        checkouts: of other repositories, by name: any folder within.
    """
    found = {"command": command, "python": platform.python_version(), "cpu": _cpu()}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    found["mis-plugins commit"] = commit(REPOSITORY, measured)
    return found | {f"{name} commit": commit(_top(path), (".",)) for name, path in (checkouts or {}).items()}


def as_given(program: str, words: Sequence[str]) -> str:
    """A command; absolute paths are cut to their last part."""
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return " ".join([program, *shown])


def as_markdown(found: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in found.items() if key != "command")
    return f"```\n{found['command']}\n```\n\n| measured with | |\n|---|---|\n{rows}\n"


def committed_tree(folder: str) -> str | None:
    """A name of all that a folder of this repository holds; None where it holds what no commit does."""
    changed = git(REPOSITORY, "status", "--porcelain", "--", folder)
    return None if changed else git(REPOSITORY, "rev-parse", "--quiet", "--verify", f"HEAD:{folder}") or None


def _top(folder: Path) -> Path:
    """Of the repository that holds it; itself where there is none."""
    return Path(git(folder, "rev-parse", "--show-toplevel") or folder)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor() or platform.machine())}, {len(lines) and _cores(lines)} cores"


def _cores(lines: list[str]) -> int:
    return sum(line.startswith("processor") for line in lines)
