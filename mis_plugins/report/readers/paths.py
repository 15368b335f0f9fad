"""From the paths that a user names to sources: folders are searched, and files that belong together are joined.

Every file is told apart by what it holds. A host's dump is mapped and not read, so that its tensors take no memory
before they are used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.report.readers import curves, host, miles, neutral, slime
from mis_plugins.report.readers.settings import Settings, settings
from mis_plugins.report.readers.source import Curve, Problems, Source
from mis_plugins.report.record import Record
from mis_plugins.shared.foreign import load_foreign
from mis_plugins.shared.storage import RecordError

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
    dumps = [file for file in files if file.suffix == ".pt"]
    sources = list(_dumps(dumps, problems))
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
        (file for file in path.rglob("*") if file.is_file() and not _beside(file, path)), key=_natural
    )


def _beside(file: Path, folder: Path) -> bool:
    return bool(BESIDE & set(file.relative_to(folder).parts[:-1]))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key by which rollout 9 stands before rollout 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


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


EVALUATION = "eval_"  # names a host's dump of an evaluation, beside a rollout's dump with the same number


def _dumps(files: Sequence[Path], problems: Problems) -> Iterator[Source]:
    """Sources of dumps of Miles and slime: training data joined over ranks, and what rollouts' dumps add to them."""
    trained: dict[tuple[str, str], list[Path]] = defaultdict(list)
    rolled: dict[str, Path] = {}
    for file in files:
        try:
            kind, rollout = _kind(load_foreign(file))
        except RecordError as error:
            problems.add(str(error))
            continue
        if kind == "rollout" and file.stem.startswith(EVALUATION):
            continue
        if kind == "rollout":
            rolled[rollout] = file
        elif kind:
            trained[kind, rollout].append(file)
        else:
            problems.add(f"{file}: no dump of training or rollout data by Miles or slime")
    for (kind, rollout), parts in sorted(trained.items(), key=lambda item: _natural(Path(item[0][1]))):
        both = tuple(parts) + ((rolled[rollout],) if rollout in rolled else ())
        yield Source(f"{kind} rollout {rollout}", both, partial(_records, kind, parts, rolled.get(rollout)))
    if rolled and not trained:
        problems.add(
            f"{next(iter(rolled.values()))}: a rollout's dump holds the engine's log-probs alone; name the folder of "
            "the training data too (--save-debug-train-data, --dump-details)"
        )


def _kind(content: Any) -> tuple[str, str]:
    """Format of a loaded dump, empty where it is none, and the name of its rollout."""
    if miles.is_train_dump(content):
        return "Miles", str(content["rollout_id"])
    if slime.is_train_dump(content):
        return "slime", str(content["rollout_id"])
    return ("rollout", str(content["rollout_id"])) if host.has_samples(content) else ("", "")


def _records(kind: str, files: Sequence[Path], rollout: Path | None, problems: Problems) -> Iterator[Record]:
    extra: host.Extra = {}
    loaded: list[Mapping[str, Any]] = []
    try:
        extra = {} if rollout is None else host.rollout_extra(load_foreign(rollout))
        loaded = [load_foreign(file) for file in files]
    except RecordError as error:
        problems.add(str(error))
    if kind == "Miles":
        if loaded:
            yield from miles.records(loaded, f"{files[0].parent}", extra, problems)
        return
    for file, content in zip(files, loaded, strict=False):
        yield from slime.records(content, str(file), extra, problems)
