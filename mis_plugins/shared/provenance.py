"""What a certificate or a record was made with: the versions, the commit, the machine."""

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

UNKNOWN = "unknown"
REPOSITORY = Path(__file__).resolve().parents[2]


def environment(packages: Iterable[str]) -> dict[str, Any]:
    """Describe what decides the bits of a process: versions of packages, machine, CPU capability, threads."""
    return {
        "packages": {name: version for name in packages if (version := installed(name))},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """The name of the CPU, from Linux or else from Python."""
    named = (line.partition(":")[2].strip() for line in cpu_lines() if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def commit(checkout: Path = REPOSITORY, paths: Sequence[str] = ("true_on_policy", "constraints.txt")) -> str:
    """The commit's first 12 digits, `(modified)` where tracked `paths` differ; `unknown` outside a checkout."""
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


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    if package == "torch":
        return torch.__version__  # names the build too: each build has its own bits
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_lines() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8").splitlines() if info.exists() else []
