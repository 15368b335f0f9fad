"""The arguments that a run was started with, where files beside its numbers hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mis_plugins.report.readers import curves
from mis_plugins.report.readers.source import Problems

SUMMARY = "summary.json"  # of the embedded host, under `arguments`
LARGEST = 16 * 1024 * 1024  # bytes of a summary
Settings = tuple[Path, Mapping[str, Any]]


def settings(files: Iterable[Path], problems: Problems) -> Iterator[Settings]:
    """Each file that holds arguments, with them: summaries of the embedded host, and offline wandb runs."""
    for file in files:
        try:
            found = _of_summary(file) if file.name == SUMMARY else {}
            if file.suffix == ".wandb":
                found = curves.wandb_settings(file)
        except (OSError, ValueError) as error:
            problems.add(f"{file}: the run's arguments cannot be read: {error}")
            continue
        if found:
            yield file, found


def _of_summary(file: Path) -> Mapping[str, Any]:
    if file.stat().st_size > LARGEST:
        return {}
    held = json.loads(file.read_text(encoding="utf-8"))
    found = held.get("arguments") if isinstance(held, dict) else None
    return found if isinstance(found, dict) else {}
