"""What a figure, a certificate or a record was made with: the command, the versions, the commits, the machine."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

UNKNOWN = "unknown"
REPOSITORY = Path(__file__).resolve().parents[2]


def measured_with(
    command: str, measured: Sequence[str], checkouts: Mapping[str, Path] | None = None
) -> dict[str, str]:
    """The command, versions, commits and processor that somebody needs to repeat a figure.

    Args:
        measured: git's paths of the code that the figures follow from; uncommitted changes there are told.
        checkouts: any folder of each other repository, by the repository's name.
    """
    found = {
        "command": command,
        "python": platform.python_version(),
        "cpu": f"{cpu_name()}, {_cores()} cores",
    }
    found |= {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    found["mis-plugins commit"] = commit(REPOSITORY, measured)
    return found | {f"{name} commit": commit(_top(path), (".",)) for name, path in (checkouts or {}).items()}


def as_given(program: str, words: Sequence[str]) -> str:
    """A command as a shell reads it, with absolute paths cut to their last part."""
    shown = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return " ".join([program, *map(shlex.quote, shown)])


def as_markdown(found: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in found.items() if key != "command")
    return f"```\n{found['command']}\n```\n\n| measured with | |\n|---|---|\n{rows}\n"


def committed_tree(folder: str) -> str | None:
    """Git's name of a folder's content at HEAD; None where the folder holds changes that no commit has."""
    changed = git(REPOSITORY, "status", "--porcelain", "--", folder)
    return None if changed else git(REPOSITORY, "rev-parse", "--quiet", "--verify", f"HEAD:{folder}") or None


def environment(packages: Iterable[str]) -> dict[str, Any]:
    """Describe what decides the bits of a process: versions of packages, machine, CPU capability, threads."""
    return {
        "packages": {name: found for name in packages if (found := _version(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """The name of the CPU, from Linux or else from Python."""
    named = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def commit(checkout: Path = REPOSITORY, paths: Sequence[str] = ("true_on_policy", "constraints.txt")) -> str:
    """The commit's first twelve digits, with `(modified)` where a tracked file of `paths` differs.

    The answer is `unknown` outside a checkout.
    """
    # An installed package may lie in the checkout of some other project, whose commit says nothing of ours.
    if Path(git(checkout, "rev-parse", "--show-toplevel") or "/").resolve() != checkout.resolve():
        return UNKNOWN
    changed = git(checkout, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return git(checkout, "rev-parse", "HEAD")[:12] + (" (modified)" if changed else "")


def git(checkout: Path, *words: str) -> str:
    """What git prints for a command in a checkout; empty where there is no git, or no repository."""
    command = ["git", "-C", str(checkout), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _top(folder: Path) -> Path:
    """Top folder of the repository that holds a folder; the folder itself where no repository does."""
    return Path(git(folder, "rev-parse", "--show-toplevel") or folder)


def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # names the build too: each build has its own bits
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    return sum(line.startswith("processor") for line in _cpu_lines())


def _cpu_lines() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8").splitlines() if info.exists() else []
