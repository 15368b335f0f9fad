"""What a figure was measured with: the command, the versions, the commits, the processor."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

from true_on_policy.commit import REPOSITORY, commit


def provenance(checkouts: dict[str, Path] | None = None) -> dict[str, str]:
    """Figures without these cannot be repeated; paths are cut to their last part."""
    found = {"command": _command(), "python": platform.python_version(), "cpu": _cpu()}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    repositories = {"mis-plugins": REPOSITORY, **(checkouts or {})}
    return found | {f"{name} commit": _commit(path) for name, path in repositories.items()}


def as_markdown(found: dict[str, str]) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in found.items() if key != "command")
    return f"```\n{found['command']}\n```\n\n| measured with | |\n|---|---|\n{rows}\n"


def _command() -> str:
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor() or platform.machine())}, {len(lines) and _cores(lines)} cores"


def _cores(lines: list[str]) -> int:
    return sum(line.startswith("processor") for line in lines)


def _commit(checkout: Path) -> str:
    if checkout != REPOSITORY:
        return commit(checkout, (".",))
    measured = ("mis_plugins", "true_on_policy", "benchmarks", ":!mis_plugins/local", ":!benchmarks/results")
    return commit(checkout, measured)
