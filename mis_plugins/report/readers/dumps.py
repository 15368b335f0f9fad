"""Dumps of Miles and slime: which files are some, which belong together, and the records that they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mis_plugins.report.readers import host, miles, slime
from mis_plugins.report.readers.source import Problems, Source, natural
from mis_plugins.report.record import Record
from mis_plugins.shared.foreign import load_foreign

EVALUATION = "eval_"  # names a host's dump of an evaluation, beside a rollout's dump with the same number
Loaded = tuple[Path, Mapping[str, Any]]


def dumps(files: Iterable[Path], problems: Problems) -> Iterator[Source]:
    """Sources of dumps of Miles and slime: training data joined over ranks, and what rollouts' dumps add to them."""
    trained: dict[tuple[str, str], list[Path]] = defaultdict(list)
    rolled: dict[str, Path] = {}
    for file in files:
        kind = rollout = ""
        with problems.guarded(file):
            kind, rollout = _kind(load_foreign(file))
            if not kind:
                problems.add("no dump of training or rollout data by Miles or slime", file)
        if kind == "rollout" and not file.stem.startswith(EVALUATION):
            rolled[rollout] = file
        elif kind and kind != "rollout":
            trained[kind, rollout].append(file)
    for (kind, rollout), parts in sorted(trained.items(), key=lambda item: natural(Path(item[0][1]))):
        both = tuple(parts) + ((rolled[rollout],) if rollout in rolled else ())
        yield Source(f"{kind} rollout {rollout}", both, partial(_records, kind, parts, rolled.get(rollout)))
    if rolled and not trained:
        problems.add(
            "a rollout's dump holds the engine's log-probs alone; name the folder of the training data too "
            "(--save-debug-train-data, --dump-details)",
            next(iter(rolled.values())),
        )


def _kind(content: Any) -> tuple[str, str]:
    """Format of a loaded dump, empty where it is none, and the name of its rollout."""
    if miles.is_train_dump(content):
        return "Miles", str(host.rollout_id(content))
    if slime.is_train_dump(content):
        return "slime", str(host.rollout_id(content))
    return ("rollout", str(host.rollout_id(content))) if host.has_samples(content) else ("", "")


def _records(kind: str, files: Sequence[Path], rollout: Path | None, problems: Problems) -> Iterator[Record]:
    extra: host.Extra = {}
    if rollout is not None:
        with problems.guarded(rollout):
            extra = host.rollout_extra(load_foreign(rollout))
    loaded = list(_loaded(files, problems))
    if kind == "Miles":
        yield from miles.records([content for _, content in loaded], f"{files[0].parent}", extra, problems)
        return
    for file, content in loaded:
        yield from slime.records(content, str(file), extra, problems)


def _loaded(files: Sequence[Path], problems: Problems) -> Iterator[Loaded]:
    for file in files:
        content = None
        with problems.guarded(file):
            content = load_foreign(file)
        if content is not None:
            yield file, content
