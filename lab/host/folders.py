"""Where runs write: no run is written over an earlier one.

A run that would meet an earlier one in its folder takes the next number: FOLDER-2, FOLDER-3 and so on.
"""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from mis_plugins.errors import ConfigError

METRICS, SUMMARY, CURVES, STEPS = "metrics.jsonl", "summary.json", "curves.png", "steps.jsonl"
CHECKPOINT = "checkpoint.pt"


def run_folder(args: Namespace) -> Path:
    """The folder of a run, made where it is missing: `--output`, unless that holds another run.

    Raises:
        ConfigError: `--save` would write over the checkpoint of another run.
        OSError: the folder cannot be made.
    """
    _check_save(args.save, args.load)
    asked = Path(args.output)
    folder = asked if args.load and _continues(asked, args.load) else unused(asked)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_save(save: str | None, load: str | None) -> None:
    if save is None or not (Path(save) / CHECKPOINT).exists() or _same(save, load):
        return
    raise ConfigError(
        f"--save {save}: holds the checkpoint of an earlier run; resume that run with --load {save}, "
        "or name another folder"
    )


def _continues(folder: Path, load: str) -> bool:
    """Whether the run in a folder is the one that saved the checkpoint; a run that was killed left no summary."""
    summary = folder / SUMMARY
    return not summary.is_file() or _same(json.loads(summary.read_text())["arguments"]["save"], load)


def _same(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()


def unused(folder: Path, runs: Iterable[str] = (".",)) -> Path:
    """The folder, or the first free numbered one where it holds an earlier run.

    Args:
        runs: places in the folder where a run may lie.
    """
    if not any(_holds_run(folder / run) for run in runs):
        return folder
    free = _numbered(folder)
    print(f"{folder} holds an earlier run; the new one goes to {free}", file=sys.stderr)
    return free


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS, SUMMARY))


def _numbered(folder: Path) -> Path:
    """The first of FOLDER-2, FOLDER-3 and so on that is missing or empty."""
    whole = folder.resolve() if folder.name in ("", "..") else folder
    names = (whole.with_name(f"{whole.name}-{number}") for number in itertools.count(2))
    return next(path for path in names if not path.exists() or (path.is_dir() and not any(path.iterdir())))
