"""From the paths that a user names to sources: folders are searched, and files that belong together are joined.

Every file is told apart by what it holds. The tensors of a host's dump are read where they are
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mis_plugins.errors import InputError
from mis_plugins.report.readers import curves, neutral
from mis_plugins.report.readers.dumps import dumps
from mis_plugins.report.readers.settings import Settings, settings
from mis_plugins.report.readers.source import Curve, Problems, Source, natural

VERL = (
    "verl's rollout_data_dir (read: releases 0.4.1 to 0.7.0 and 0.8.0.dev b178a3c) holds texts and scores, and no "
    "log-probs; write the neutral form from `batch.batch` instead, as docs/report.md shows"
)
NOTHING = (
    "holds nothing that this command reads: dumps of Miles or slime (--dump-details), the neutral form (jsonl, "
    "parquet), metrics.jsonl, wandb or tensorboard files"
)


@dataclass(frozen=True)
class Found:
    """What all paths of a command hold.

    curves: files of curves with their formats.
    settings: arguments of runs, each with its file.
    tokenizer: the tokenizer that a host wrote beside its dump.
    """

    sources: tuple[Source, ...]
    curves: tuple[tuple[Path, str], ...]
    settings: tuple[Settings, ...] = ()
    tokenizer: Path | None = None

    def read_curves(self, problems: Problems) -> tuple[Curve, ...]:
        return tuple(curves.curve(path, kind, problems) for path, kind in self.curves)


def find(paths: Sequence[Path], problems: Problems) -> Found:
    """Sources of all paths, in the order of rollouts.

    Raises:
        InputError: a path does not exist, or nothing that it holds can be read.
    """
    files = [file for path in paths for file in _files(path)]
    host_files = [file for file in files if file.suffix == ".pt"]
    sources = list(dumps(host_files, problems))
    lines = []
    for file in files:
        if file.suffix == ".pt" or file in {part for source in sources for part in source.files}:
            continue
        kind = curves.kind_of(file)
        if kind is not None and not (kind == "metrics.jsonl" and _is_verl(file)):
            lines.append((file, kind))
        else:
            sources += _neutral(file, problems, named=file in paths)
    if not sources and not lines:
        raise InputError("; ".join(problems.told) or f"{', '.join(map(str, paths))}: {NOTHING}")
    held = tuple(settings(files, problems))
    return Found(tuple(sources), tuple(lines), held, _tokenizer(paths))


def _tokenizer(paths: Sequence[Path]) -> Path | None:
    """`tokenizer/tokenizer.json`, which both hosts write into the folder of `--dump-details`."""
    return next((file for path in paths if (file := path / "tokenizer" / "tokenizer.json").is_file()), None)


# What hosts write beside their dumps, and nobody needs here.
BESIDE = {"policy_loss_debug", "dashboard_columns", "dashboard", "events", "trajectory", "tokenizer"}


def _files(path: Path) -> Iterable[Path]:
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    return sorted(
        (file for file in path.rglob("*") if file.is_file() and not _beside(file, path)), key=natural
    )


def _beside(file: Path, folder: Path) -> bool:
    return bool(BESIDE & set(file.relative_to(folder).parts[:-1]))


def _is_verl(file: Path) -> bool:
    return {"input", "output", "score"} <= neutral.first_object(file).keys()


def _neutral(file: Path, problems: Problems, named: bool) -> Iterator[Source]:
    if file.suffix == ".parquet":
        yield Source("parquet", (file,), partial(neutral.parquet, file))
    elif neutral.is_jsonl(file):
        yield Source("jsonl", (file,), partial(neutral.jsonl, file))
    elif _is_verl(file):
        problems.add(f"{file}: {VERL}")
    elif named:
        problems.add(f"{file}: {NOTHING}")
