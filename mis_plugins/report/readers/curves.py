"""Curves without tokens: metrics.jsonl, offline wandb runs, tensorboard event files.

Both foreign formats are decoded here, so that neither package needs to be installed; a cut or damaged tail ends the
curve and is told.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mis_plugins.metrics.metric import PREFIX
from mis_plugins.metrics.peer_names import PEERS
from mis_plugins.report.readers.neutral import LONGEST_LINE, first_object
from mis_plugins.report.readers.protobuf import fields, number
from mis_plugins.report.readers.source import Curve, Problems

STEPS = ("rollout", "step", "train/step", "rollout/step", "_step", "rollout_id")
OURS = {theirs: ours for names in PEERS.values() for theirs, ours in names.items()} | {"k3_kl": "kl_k3"}
BLOCK, HEADER = 32_768, 7  # of wandb's log, which has the layout of LevelDB's

Points = dict[int, dict[str, float]]


def our_name(name: str) -> str:
    """The name that our page gives a number; the name itself where the page has none."""
    bare = name.removeprefix(PREFIX).removeprefix("mis_step/")
    return OURS.get(bare) or OURS.get(bare.removeprefix("train/")) or bare


def kind_of(path: Path) -> str | None:
    """Name of the format of curves that a file has; None where it has none."""
    if path.suffix == ".wandb":
        return "wandb"
    if "tfevents" in path.name:
        return "tensorboard"
    if path.suffix not in (".jsonl", ".json"):
        return None
    found = first_object(path)
    return (
        "metrics.jsonl" if found and "behavior_log_probs" not in found and _step(found) is not None else None
    )


def curve(path: Path, kind: str, problems: Problems) -> Curve:
    """The numbers of a file by step."""
    points: Points = defaultdict(dict)
    try:
        READERS[kind](path, points)
    except (OSError, ValueError, struct.error) as error:
        problems.add(f"{path}: {kind} is damaged after step {max(points, default='none')}: {error}")
    return Curve(str(path), {step: points[step] for step in sorted(points)})


def _step(found: Mapping[str, object]) -> int | None:
    given = (found.get(name) for name in STEPS)
    return next((int(value) for value in given if isinstance(value, int | float)), None)


def _jsonl(path: Path, points: Points) -> None:
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            found = json.loads(line) if line.strip() else {}
            step = _step(found)
            if step is not None:
                points[step] |= {our_name(name): float(x) for name, x in found.items() if _is_number(x)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tensorboard(path: Path, points: Points) -> None:
    with path.open("rb") as file:
        while header := file.read(12):
            (size,) = struct.unpack("<Q", header[:8])
            event = file.read(min(size, LONGEST_LINE))
            if len(event) < size or len(file.read(4)) < 4:
                raise ValueError("the end of the file is cut")
            _add_event(event, points)


def _add_event(event: bytes, points: Points) -> None:
    """An Event: 2 is its step, 5 its summary of values, each of which has a tag (1) and a number (2, or 8 a tensor)."""
    found = dict(fields(event))
    summary, step = found.get(5), found.get(2, 0)
    if not isinstance(summary, bytes) or not isinstance(step, int):
        return
    for _, value in fields(summary):
        parts = dict(fields(value)) if isinstance(value, bytes) else {}
        tag, simple, tensor = parts.get(1), parts.get(2), parts.get(8)
        content = simple if isinstance(simple, bytes) else _of_tensor(tensor)
        if isinstance(tag, bytes) and content is not None:
            points[step][our_name(tag.decode())] = number(content)


def _of_tensor(tensor: object) -> bytes | None:
    """The one float of a TensorProto: packed in field 5, or raw in field 4."""
    parts = dict(fields(tensor)) if isinstance(tensor, bytes) else {}
    found = parts.get(5) or parts.get(4)
    return found if isinstance(found, bytes) and len(found) == 4 else None


def _wandb(path: Path, points: Points) -> None:
    for name, content in _wandb_fields(path):
        if name == 2:
            _add_history(content, points)


def wandb_settings(path: Path) -> dict[str, Any]:
    """The config of an offline wandb run: its record (17) holds one (4), and later ones (5) add to it."""
    found: dict[str, Any] = {}
    for name, content in _wandb_fields(path):
        held = [content] if name == 5 else []
        if name == 17:
            held = [part for number, part in fields(content) if number == 4 and isinstance(part, bytes)]
        for config in held:
            items = (item for number, item in fields(config) if number == 1 and isinstance(item, bytes))
            found |= dict(map(_item, items))
    return found


def _wandb_fields(path: Path) -> Iterator[tuple[int, bytes]]:
    """Fields of all records of an offline wandb run that are messages."""
    with path.open("rb") as file:
        if file.read(HEADER)[:4] != b":W&B":
            raise ValueError("no log of wandb")
        for record in _logged(file):
            yield from ((name, content) for name, content in fields(record) if isinstance(content, bytes))


def _item(message: bytes) -> tuple[str, Any]:
    """Key (1, or 2 in parts) and value as json (16) of an item of a HistoryRecord or a ConfigRecord."""
    parts = [(number, part) for number, part in fields(message) if isinstance(part, bytes)]
    key = "/".join(part.decode() for number, part in parts if number in (1, 2))
    return key, json.loads(next((part for number, part in parts if number == 16), b"null"))


def _logged(file: BinaryIO) -> Iterator[bytes]:
    """Records of a log in LevelDB's layout: blocks of 32 KB, and pieces that are whole (1), first, middle or last."""
    record = b""
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
            raise ValueError("the end of the file is cut")
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            yield record


def _add_history(history: bytes, points: Points) -> None:
    """A HistoryRecord: items (1) and the step (2)."""
    found: dict[str, Any] = {}
    step: object = None
    for name, content in fields(history):
        if name == 1 and isinstance(content, bytes):
            key, value = _item(content)
            found[key] = value
        elif name == 2 and isinstance(content, bytes):
            step = dict(fields(content)).get(1, 0)
    named = _step(found)
    at = named if named is not None else step if isinstance(step, int) else None
    if at is not None:
        points[at] |= {our_name(key): float(x) for key, x in found.items() if _is_number(x)}


READERS: dict[str, Callable[[Path, Points], None]] = {
    "metrics.jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
