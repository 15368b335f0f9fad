"""From the paths that a user names to sources: folders are searched, and files that belong together are joined.

Every file is told apart by what it holds. A host's dump is mapped and not read, so that its tensors take no memory
before they are used.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.explain.limits import LIMITS
from mis_plugins.report.readers import curves, neutral
from mis_plugins.report.readers.dumps import dumps
from mis_plugins.report.readers.files import Curve, Problems, Source, objects, size_of
from mis_plugins.report.record import REQUIRED, lacking, nearest
from mis_plugins.shared.opened import Opened, natural

VERL = (
    "verl's rollout_data_dir (read: releases 0.4.1 to 0.7.0 and 0.8.0.dev b178a3c) holds texts and scores, and no "
    "log-probs; write the neutral form from `batch.batch` instead, as docs/report.md shows"
)
NOTHING = (
    "holds nothing that this command reads: dumps of Miles or slime (--dump-details), the neutral form (jsonl, "
    "parquet), metrics.jsonl, wandb or tensorboard files"
)
TABLES = (".csv", ".tsv")
TABLE = (
    'a table of csv or tsv is not read; write one JSON object a line, as {"step": 3, "kl_k3": 0.001}, or name the '
    "run's offline wandb or tensorboard files"
)


@dataclass(frozen=True)
class Found:
    """What all paths of a command hold.

    curves: files of curves with their formats.
    files: all files.
    others: files of no format that is read.
    """

    sources: tuple[Source, ...]
    curves: tuple[tuple[Path, str], ...]
    files: tuple[Path, ...]
    others: tuple[Path, ...]

    def read_curves(self, problems: Problems) -> tuple[Curve, ...]:
        """Curves of all runs that hold a step."""
        runs: dict[tuple[str, Path | str], list[Path]] = defaultdict(list)
        for path, kind in self.curves:  # a restart writes another file of tensorboard, and wandb's run of one name
            runs[kind, {"tensorboard": path.parent, "wandb": path.name}.get(kind, path)].append(path)
        read = (curves.curve(paths, kind, problems) for (kind, _), paths in runs.items())
        return tuple(curve for curve in read if curve.values)


def find(paths: Sequence[Path], problems: Problems) -> Found:
    """Sources of all paths, in the order of rollouts; raises InputError where a path does not exist."""
    files = _once([file for path in paths for file in _files(path, problems)])
    saved = {file: None for file in files if file.suffix == ".pt" or problems.read(partial(_is_saved, file), file)}
    sources = list(dumps(saved, problems))
    lines, others = [], []
    for file in (file for file in files if file not in saved):
        kind = format_of(file)
        if kind in curves.READERS:
            lines.append((file, kind))
        elif kind in NEUTRAL:
            sources.append(Source(kind, (file,), partial(NEUTRAL[kind], file)))
        elif kind == "verl":
            problems.add(VERL, file)
        elif file in paths or _plain(file).suffix in (".jsonl", *TABLES):
            tell_nothing(file, problems)
        else:
            others.append(file)
    return Found(tuple(sources), tuple(lines), tuple(files), tuple(others))


def _once(files: Sequence[Path]) -> list[Path]:
    """The files under one name each; a link and its file are one."""
    held = {(stat.st_dev, stat.st_ino): file for file in reversed(files) if (stat := file.stat())}
    return list(reversed(held.values()))


# What hosts write beside their dumps, and nobody needs here.
BESIDE = {"policy_loss_debug", "dashboard_columns", "dashboard", "events", "trajectory", "tokenizer"}


def _files(path: Path, problems: Problems) -> list[Path]:
    """The regular files of a path in natural order; everything else in a folder is told."""
    try:
        path.stat()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise InputError(f"{path}: {'no such file or folder' if missing else error.strerror}") from error
    files = _within(path, problems) if path.is_dir() else [path]
    return sorted((file for file in files if _is_regular(file, problems)), key=natural)


def _within(folder: Path, problems: Problems) -> Iterator[Path]:
    """Everything in a folder but folders. Links to folders may form a loop, and are not followed."""

    def unreadable(error: OSError) -> None:
        problems.add(f"{error.strerror}", error.filename, torn=True)

    for where, folders, files in os.walk(folder, onerror=unreadable):
        for link in filter(Path.is_symlink, (Path(where, name) for name in folders)):
            problems.add("a link to a folder is not followed; name the folder", link)
        folders[:] = set(folders) - BESIDE
        yield from (Path(where, name) for name in files)


SAVED = re.compile(rb"PK\x03\x04.{0,500}/data\.pkl", re.DOTALL)  # the beginning of what torch saves: an archive
DATA = {".pt", ".jsonl", ".parquet"}  # the endings of files of tokens


def _is_regular(file: Path, problems: Problems) -> bool:
    return problems.read(lambda: Opened(file).file.close() or True, file, torn=_plain(file).suffix in DATA) is not None


def _is_saved(file: Path) -> bool:
    """Whether torch saved a file, under whatever name that a host's flag gives it, as one and no checkpoint's shard."""
    with Opened(file).file as content:
        return file.suffix != ".distcp" and SAVED.match(content.read(512)) is not None


NEUTRAL = {"parquet": neutral.parquet, "jsonl": neutral.jsonl}


def format_of(file: Path) -> str | None:
    """Name of the format of a file that is no dump; None where it has none."""
    if file.suffix == ".wandb":
        return "wandb"
    if "tfevents" in file.name:
        return "tensorboard"
    if file.suffix == ".parquet":
        return "parquet"
    head = Problems().each(objects(file, Problems(), head=True), file, size_of(file))
    return next(filter(None, (_shown_by(mapping, file) for _, mapping in head)), None)


def _shown_by(mapping: Mapping[str, Any], file: Path) -> str | None:
    """Name of the format that an object in the first lines of a file shows; None where it shows none."""
    if {"input", "output", "score"} <= mapping.keys():
        return "verl"
    lists = [key for key, value in mapping.items() if isinstance(value, list) or key in REQUIRED]
    if any(nearest(name, lists) for name in REQUIRED):
        return "jsonl"
    has_step = not mapping.keys().isdisjoint(curves.STEPS_OF_HOSTS)
    return "metrics.jsonl" if _plain(file).suffix in (".jsonl", ".json") and has_step else None


def tell_nothing(file: Path, problems: Problems) -> None:
    """Tell why a file is not read.

    A file that holds an object lacks keys, and its keys are told. A file without one breaks off, so that its tokens are
    lost: the fault of its first line is told, or that the file has none.
    """
    broken, torn = Problems(), False
    head = broken.each(objects(file, broken, head=True), file, size_of(file))
    first = next((mapping for _, mapping in head), None)
    if first is not None and not LIMITS.keys().isdisjoint(map(curves.our_name, first)):
        why = f"holds numbers without their step; name it by one of {', '.join(curves.STEPS_OF_HOSTS)}"
    elif first is not None:
        why = f"{NOTHING}; {lacking(REQUIRED, first)}"
    elif _plain(file).suffix in TABLES:
        why = TABLE
    else:
        wrong = [f"{problem.place}: {problem.reason}".removeprefix(": ") for problem in broken.kept[:1]]
        why, torn = "; ".join([*(wrong or ["holds no line"]), NOTHING]), True
    problems.add(why, file, torn=torn)


def _plain(file: Path) -> Path:
    """The name of a file without the ending of what packed it."""
    return file.with_suffix("") if file.suffix in (".gz", ".zst") else file
