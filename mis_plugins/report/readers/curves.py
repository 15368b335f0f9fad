"""Numbers of a run by step, without tokens: metrics.jsonl, offline wandb runs, tensorboard event files.

Both foreign formats are decoded here, so that neither package needs to be installed; a cut or damaged tail ends the
curve and is told.
"""

import math
import re
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, BinaryIO

import yaml

from mis_plugins.explain.limits import FIRST, LIMITS, Limits
from mis_plugins.metrics.alarms import PREFIX
from mis_plugins.report.readers.files import Curve, Problems, objects, parsed, size_of
from mis_plugins.report.record import LONGEST_WORD, printed, step_of
from mis_plugins.shared.budget import ITEMS, LINE, STEPS, RecordError
from mis_plugins.shared.opened import Opened

STEPS_OF_HOSTS = (
    "rollout", "step", "train/step", "rollout/step", "eval/step", "_step", "rollout_id", "global_step", "iteration",
    "train/global_step", "global_step/max_steps",
)  # fmt: skip
# What other packages call our metrics: by package, ours beside a name of theirs.
PEERS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).parents[1].joinpath("peer_names.yaml").read_bytes())
OURS = {theirs: ours for names in PEERS.values() for theirs, ours in names.items()} | {
    "k3_kl": "kl_k3", "mis_kept_fraction": "kept_fraction", "mis_ess_mb": "ess",  # of our own hooks
}  # fmt: skip
IN_BYPASS = "train_rollout_kl"  # Miles's kl_k3, at each step 0 with --use-rollout-logprobs whatever the mismatch
IN_FRONT = re.compile("^(train|actor|policy)/(loss_metrics/)?")  # what packages put before a name of theirs
BLOCK, HEADER = 32_768, 7  # of wandb's log, which has the layout of LevelDB's
FIXED = {1: 8, 5: 4}  # bytes of a protobuf field of a fixed size
LONGEST_COUNT = 19  # digits

Row = tuple[int, Mapping[str, float]]  # a step with numbers of it
Field = tuple[int, int | bytes]  # number and content of a protobuf field


def our_name(name: str) -> str:
    """The name that our page gives a number; the name itself where the page has none."""
    bare = printed(name, LONGEST_WORD).removeprefix(PREFIX).removeprefix("mis_step/")
    return OURS.get(bare) or OURS.get(IN_FRONT.sub("", bare)) or bare


def _is_of_bypass(name: str) -> bool:
    """Whether a name in a log is `IN_BYPASS`, in whatever folder of the tracker."""
    return name.endswith(IN_BYPASS) and our_name(name) == FIRST


def curve(paths: Sequence[Path], kind: str, problems: Problems) -> Curve:
    """The numbers of one run's files by step; where the end of a file is damaged, those before it."""
    points = Points()
    for path in paths:
        problems.read(partial(_add_rows, points, path, kind, problems), path, torn=True)
    more = f" and {len(paths) - 1} more" if paths[1:] else ""
    return Curve(f"{paths[0]}{more}", {step: points.at(step) for step in sorted(points.kept)}, points.replaced)


@dataclass
class Points:
    """The numbers of a run, by our names.

    kept: the numbers of each step; of two names of one number the one that lies beyond its limit.
    replaced: as of a `Curve`.
    logged: of each step the names in the file of the numbers in `kept` that have a limit.
    order: the steps of `logged`, sorted.
    is_measured: whether `IN_BYPASS` is ever another number than 0.
    """

    kept: dict[int, dict[str, float]] = field(default_factory=dict)
    replaced: list[Row] = field(default_factory=list)
    logged: dict[int, set[str]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    is_measured: bool = False

    def at(self, step: int) -> dict[str, float]:
        """The numbers of a step. `IN_BYPASS` of 0 counts as a mismatch of 0 where another step measured it."""
        is_zero = self.is_measured and any(map(_is_of_bypass, self.kept[step]))
        return {FIRST: 0.0} | self.kept[step] if is_zero else self.kept[step]

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Add a row of a log. Where the log has one of its numbers already, the run starts anew from the step on."""
        names = {name: our_name(name) if x or not _is_of_bypass(name) else name for name, x in row.items()}
        self.is_measured |= any(x and _is_of_bypass(name) for name, x in row.items())
        limited, kept = {name for name, ours in names.items() if ours in LIMITS}, self.kept.setdefault(step, {})
        if not limited.isdisjoint(self.logged.get(step, ())):
            self._start_anew(step)
        if step not in self.logged:
            insort(self.order, step)
        self.logged[step] = self.logged.get(step, set()) | limited
        for ours, x in ((names[name], x) for name, x in row.items()):
            kept[ours] = max(x, kept.get(ours, x), key=partial(_badness, LIMITS.get(ours, Limits())))

    def _start_anew(self, step: int) -> None:
        """Move the numbers that have a limit of a step, and of all later ones, to `replaced`."""
        first = bisect_left(self.order, step)
        for later in self.order[first:]:
            kept = self.kept[later]
            self.replaced.append((later, {name: kept.pop(name) for name in LIMITS if name in kept}))
            del self.logged[later]
        del self.order[first:]


def _add_rows(points: Points, path: Path, kind: str, problems: Problems) -> None:
    size, held = size_of(path), 0
    for step, row in problems.each(READERS[kind](path, problems), path, size):
        held += len(row)
        ITEMS.check(held, size, path)
        points.add(step, row)
        STEPS.check(len(points.kept), size, path)


def _badness(limits: Limits, value: float) -> int:
    """2 beyond a limit, 1 for NaN, 0 within the limits."""
    return 1 if math.isnan(value) else 0 if limits.low <= value <= limits.high else 2


def _row(mapping: Mapping[str, Any], step: object = None) -> list[Row]:
    """The numbers of a row by their names in the file; none without a step."""
    given = [*(_count(mapping[name]) for name in STEPS_OF_HOSTS if name in mapping), *([] if step is None else [step])]
    logged = mapping.get("data")  # verl's file of a run, whose writer has null for NaN
    if isinstance(logged, Mapping) and mapping.keys() <= {*STEPS_OF_HOSTS, "data"}:
        mapping = {name: "NaN" if x is None else x for name, x in logged.items()}
    if not given:
        return []
    numbers = {name: number for name, x in mapping.items() if (number := _float(name, x)) is not None}
    return [(step_of(next((step for step in given if type(step) in (int, float)), given[0])), numbers)]


def _float(name: str, value: Any) -> float | None:
    """A number, which writers of JSON also write as text; None of another value, refused where the name has a limit."""
    try:
        return None if value is None or isinstance(value, bool | Mapping) else float(value)  # as media of wandb
    except (TypeError, ValueError, OverflowError):
        if our_name(name) in LIMITS:
            raise RecordError(f"{name}: got {shortened(value)}; give a number") from None
        return None


def _count(step: Any) -> Any:
    """The number of a step; ms-swift writes `3/100` for the third of a hundred steps."""
    count = step.partition("/")[0] if isinstance(step, str) else ""
    return int(count) if count.isdecimal() and len(count) < LONGEST_COUNT else step


def _jsonl(path: Path, problems: Problems) -> Iterator[Row]:
    for place, mapping in objects(path, problems):
        yield from problems.read(partial(_row, mapping), path, place) or ()


# Tensorboard.


def _tensorboard(path: Path, problems: Problems) -> Iterator[Row]:
    with Opened(path).file as file:
        step: object = "none"
        while header := file.read(12):
            size = int.from_bytes(header[:8], "little")
            event = file.read(min(size, int(LINE.base)))
            if len(event) < size or len(file.read(4)) < 4:
                raise RecordError(f"tensorboard is damaged after step {step}: the end of the file is cut")
            place = f"the event before byte {file.tell()}"
            for step, row in problems.read(lambda event=event: list(_event(event)), path, place) or ():
                yield step, row


def _event(event: bytes) -> Iterator[Row]:
    """An Event: 2 is its step, 5 its summary of values, each of which has a tag (1) and a number (2, or 8 a tensor)."""
    event_fields = dict(fields(event))
    summary = event_fields.get(5)
    if not isinstance(summary, bytes):
        return
    step = step_of(event_fields.get(2, 0))
    for _, value in messages(summary):
        parts = dict(messages(value))
        tag, content = parts.get(1), parts.get(2) or _of_tensor(parts.get(8, b""))
        if tag is not None and content is not None:
            yield step, {tag.decode(): number(content)}


def _of_tensor(tensor: bytes) -> bytes | None:
    """The one float of a TensorProto: packed in field 5, or raw in field 4."""
    parts = dict(messages(tensor))
    packed = parts.get(5) or parts.get(4)
    return packed if packed and len(packed) == 4 else None


# Offline wandb runs.


def _wandb(path: Path, problems: Problems) -> Iterator[Row]:
    for place, record in problems.each(_wandb_records(path), path, size_of(path)):
        yield from problems.read(partial(_histories, record, path), path, place) or ()


def _histories(record: bytes, path: Path) -> list[Row]:
    """Rows of the HistoryRecords (2) of a record: items (1) and the step (2)."""
    rows: list[Row] = []
    for history in _of(2, record):
        numbers = dict(_item(item, path) for item in _of(1, history))
        steps = [dict(fields(content)).get(1, 0) for content in _of(2, history)]
        rows += _row(numbers, steps[-1] if steps else None)
    return rows


def wandb_settings(path: Path, problems: Problems) -> dict[str, Any]:
    """The config of an offline wandb run: its record (17) holds one (4), and later ones (5) add to it."""
    settings: dict[str, Any] = {}
    for place, record in problems.each(_wandb_records(path), path, size_of(path)):
        read = partial(_settings, record, path)
        settings |= problems.read(read, path, f"{place}: the run's arguments") or {}
    return settings


def _settings(record: bytes, path: Path) -> dict[str, Any]:
    configs = [config for run in _of(17, record) for config in _of(4, run)] + _of(5, record)
    return dict(_item(item, path) for config in configs for item in _of(1, config))


def _of(wanted: int, message: bytes) -> list[bytes]:
    """The messages of one number within a message."""
    return [content for name, content in messages(message) if name == wanted]


def _item(message: bytes, path: Path) -> tuple[str, Any]:
    """Key (1, or 2 in parts) and value as json (16) of an item of a HistoryRecord or a ConfigRecord."""
    parts = list(messages(message))
    key = "/".join(part.decode() for name, part in parts if name in (1, 2))
    return key, parsed(next((part for name, part in parts if name == 16), b"null"), path)


def _wandb_records(path: Path) -> Iterator[tuple[str, bytes]]:
    """Place and content of every record of an offline wandb run."""
    with Opened(path).file as file:
        if file.read(HEADER)[:4] != b":W&B":
            raise RecordError(f"{path}: no log of wandb")
        for count, record in enumerate(_logged(file, path), 1):
            yield f"record {count}", record


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


READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {
    "metrics.jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}

# The few lines of protobuf that both formats need.


def fields(message: bytes) -> Iterator[Field]:
    """Number and content of each field: an int of a varint, the bytes of everything else."""
    stream, count = BytesIO(message), 0
    while stream.tell() < len(message):
        count += 1
        ITEMS.check(count, len(message), "a message")
        key = _varint(stream)
        kind = key & 7
        if kind not in (0, 2, *FIXED):
            raise ValueError(f"a field of kind {kind}")
        size = FIXED.get(kind) or _varint(stream)
        if kind and size > len(message) - stream.tell():
            raise ValueError("a field is cut")
        yield key >> 3, stream.read(size) if kind else size


def messages(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields that hold bytes."""
    return ((name, content) for name, content in fields(message) if isinstance(content, bytes))


def number(content: bytes) -> float:
    """A float or a double, from its bytes."""
    return struct.unpack("<f" if len(content) == 4 else "<d", content)[0]


def _varint(stream: BytesIO) -> int:
    value = shift = 0
    while shift <= 63 and (byte := stream.read(1)):
        value |= (byte[0] & 127) << shift
        shift += 7
        if byte[0] < 128:
            return value
    raise ValueError("a number is cut")
