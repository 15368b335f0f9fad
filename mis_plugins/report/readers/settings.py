"""The arguments that a run was started with, where files beside its numbers hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mis_plugins.report.readers import curves
from mis_plugins.report.readers.files import opened, parsed
from mis_plugins.report.readers.source import Problems
from mis_plugins.shared.budget import LINE

SUMMARY = "summary.json"  # of the embedded host, under `arguments`
Settings = tuple[Path, Mapping[str, Any]]


def settings(files: Iterable[Path], problems: Problems) -> Iterator[Settings]:
    """Each file that holds arguments, with them: summaries of the embedded host, and offline wandb runs."""
    for file in files:
        found: Mapping[str, Any] = {}
        with problems.guarded(file, "the run's arguments"):
            if file.name == SUMMARY:
                found = _of_summary(file)
            elif file.suffix == ".wandb":
                found = curves.wandb_settings(file, problems)
        if found:
            yield file, found


def _of_summary(file: Path) -> Mapping[str, Any]:
    with opened(file) as content:
        held = parsed(content.read(int(LINE.base) + 1), file)
    found = held.get("arguments") if isinstance(held, dict) else None
    return found if isinstance(found, dict) else {}
