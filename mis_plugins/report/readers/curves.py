"""Curves without tokens: metrics.jsonl, offline wandb runs, tensorboard event files.

Both foreign formats are decoded here, so that neither package needs to be installed; a cut or damaged tail ends the
curve and is told.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mis_plugins.metrics.metric import PREFIX
from mis_plugins.metrics.peer_names import PEERS
from mis_plugins.report.readers.files import objects, opened, parsed
from mis_plugins.report.readers.protobuf import fields, number
from mis_plugins.report.readers.source import Curve, Problems, size_of
from mis_plugins.report.record import LONGEST_WORD, printed, step_of
from mis_plugins.shared.budget import ITEMS, LINE, STEPS, RecordError

STEPS_OF_HOSTS = ("rollout", "step", "train/step", "rollout/step", "_step", "rollout_id")
OURS = {theirs: ours for names in PEERS.values() for theirs, ours in names.items()} | {"k3_kl": "kl_k3"}
BLOCK, HEADER = 32_768, 7  # of wandb's log, which has the layout of LevelDB's

Row = tuple[int, Mapping[str, float]]  # a step with numbers of it


def our_name(name: str) -> str:
    """The name that our page gives a number; the name itself where the page has none."""
    bare = printed(name, LONGEST_WORD).removeprefix(PREFIX).removeprefix("mis_step/")
    return OURS.get(bare) or OURS.get(bare.removeprefix("train/")) or bare


def has_step(found: Mapping[str, object]) -> bool:
    """Whether an object names the step of its numbers."""
    return any(name in found for name in STEPS_OF_HOSTS)


def curve(path: Path, kind: str, problems: Problems) -> Curve:
    """The numbers of a file by step; where the end of the file is damaged, those before it."""
    points: dict[int, dict[str, float]] = {}
    size, held = size_of(path), 0
    with problems.guarded(path):
        for step, row in problems.each(READERS[kind](path, problems), path, size):
            held += len(row)
            ITEMS.check(held, size, path)
            points.setdefault(step, {}).update(row)
            STEPS.check(len(points), size, path)
    return Curve(str(path), {step: points[step] for step in sorted(points)})


def _row(found: Mapping[str, Any], step: object = None) -> Row | None:
    """The numbers of a row by our names; None without a step.

    Raises:
        RecordError: the step is no whole number.
    """
    given = [*(found[name] for name in STEPS_OF_HOSTS if name in found), *([] if step is None else [step])]
    if not given:
        return None
    numbers = {our_name(name): float(x) for name, x in found.items() if _is_number(x)}
    return step_of(next(filter(_is_number, given), given[0])), numbers


def _jsonl(path: Path, problems: Problems) -> Iterator[Row]:
    for place, found in objects(path, problems):
        row = None
        with problems.guarded(path, place):
            row = _row(found)
        if row is not None:
            yield row


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tensorboard(path: Path, problems: Problems) -> Iterator[Row]:
    with opened(path) as file:
        step: object = "none"
        while header := file.read(12):
            rows: list[Row] = []
            size = int.from_bytes(header[:8], "little")
            event = file.read(min(size, int(LINE.base)))
            if len(event) < size or len(file.read(4)) < 4:
                raise RecordError(f"tensorboard is damaged after step {step}: the end of the file is cut")
            with problems.guarded(path, f"the event before byte {file.tell()}"):
                rows = list(_event(event))
            for step, row in rows:
                yield step, row


def _event(event: bytes) -> Iterator[Row]:
    """An Event: 2 is its step, 5 its summary of values, each of which has a tag (1) and a number (2, or 8 a tensor)."""
    found = dict(fields(event))
    summary = found.get(5)
    if not isinstance(summary, bytes):
        return
    step = step_of(found.get(2, 0))
    for _, value in fields(summary):
        parts = dict(fields(value)) if isinstance(value, bytes) else {}
        tag, simple, tensor = parts.get(1), parts.get(2), parts.get(8)
        content = simple if isinstance(simple, bytes) else _of_tensor(tensor)
        if isinstance(tag, bytes) and content is not None:
            yield step, {our_name(tag.decode()): number(content)}


def _of_tensor(tensor: object) -> bytes | None:
    """The one float of a TensorProto: packed in field 5, or raw in field 4."""
    parts = dict(fields(tensor)) if isinstance(tensor, bytes) else {}
    found = parts.get(5) or parts.get(4)
    return found if isinstance(found, bytes) and len(found) == 4 else None


def _wandb(path: Path, problems: Problems) -> Iterator[Row]:
    for place, record in problems.each(_wandb_records(path), path, size_of(path)):
        rows: list[Row] = []
        with problems.guarded(path, place):
            rows = [row for name, content in record if name == 2 and (row := _history(content, path))]
        yield from rows


def wandb_settings(path: Path, problems: Problems) -> dict[str, Any]:
    """The config of an offline wandb run: its record (17) holds one (4), and later ones (5) add to it."""
    found: dict[str, Any] = {}
    for place, record in problems.each(_wandb_records(path), path, size_of(path)):
        with problems.guarded(path, f"{place}: the run's arguments"):
            for name, content in record:
                held = [content] if name == 5 else []
                if name == 17:
                    held = [part for inner, part in fields(content) if inner == 4 and isinstance(part, bytes)]
                for config in held:
                    items = (item for inner, item in fields(config) if inner == 1 and isinstance(item, bytes))
                    found |= dict(_item(item, path) for item in items)
    return found


def _wandb_records(path: Path) -> Iterator[tuple[str, Iterator[tuple[int, bytes]]]]:
    """Place and messages of every record of an offline wandb run."""
    with opened(path) as file:
        if file.read(HEADER)[:4] != b":W&B":
            raise RecordError(f"{path}: no log of wandb")
        for count, record in enumerate(_logged(file, path), 1):
            yield f"record {count}", _messages(record)


def _messages(record: bytes) -> Iterator[tuple[int, bytes]]:
    return ((name, content) for name, content in fields(record) if isinstance(content, bytes))


def _item(message: bytes, path: Path) -> tuple[str, Any]:
    """Key (1, or 2 in parts) and value as json (16) of an item of a HistoryRecord or a ConfigRecord."""
    parts = [(number, part) for number, part in fields(message) if isinstance(part, bytes)]
    key = "/".join(part.decode() for number, part in parts if number in (1, 2))
    return key, parsed(next((part for number, part in parts if number == 16), b"null"), path)


def _logged(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Records of a log in LevelDB's layout: blocks of 32 KB, and pieces that are whole (1), first, middle or last."""
    record, begun = bytearray(), False
    while True:
        left = BLOCK - file.tell() % BLOCK
        if left < HEADER:
            file.read(left)
        header = file.read(HEADER)
        if len(header) < HEADER:
            return
        _, size, kind = struct.unpack("<IHB", header)
        piece = file.read(size)
        if len(piece) < size:
            raise RecordError(f"{path}: the end of the file is cut")
        if kind in (1, 2):
            record, begun = bytearray(), True
        elif kind and not begun:
            raise RecordError(f"{path}: holds the end of a record without its beginning")
        record += piece
        LINE.check(len(record), len(record), path)
        if kind in (1, 4):
            begun = False
            yield bytes(record)


def _history(history: bytes, path: Path) -> Row | None:
    """A HistoryRecord: items (1) and the step (2)."""
    found: dict[str, Any] = {}
    step: object = None
    for name, content in fields(history):
        if name == 1 and isinstance(content, bytes):
            key, value = _item(content, path)
            found[key] = value
        elif name == 2 and isinstance(content, bytes):
            step = dict(fields(content)).get(1, 0)
    return _row(found, step)


READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {
    "metrics.jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
