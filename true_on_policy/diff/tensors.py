"""Compare two recordings tensor by tensor: which tensors are equal, and which operation was the first to differ."""

import os.path
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from mis_plugins.errors import shown
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.terminal import progress
from true_on_policy.bitwise import Mismatch, coordinate, first_mismatch
from true_on_policy.diff.log_prob_record import LogProbRecord, absent
from true_on_policy.diff.names import PARTS, Correspondence, Heads, Renaming, is_handed, regrouped
from true_on_policy.diff.records import Entry, Key, Recording, Value, numbered

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
EMPTY = "no tensor with values"
NEAREST = 5  # at most this many equal tensors are named as inputs of an operation

Status = Literal["equal", "different", "other dtype", "other shape", "missing in A", "missing in B", "not comparable"]
DIVERGED: Mapping[str, Status] = {"bytes": "different", "dtype": "other dtype", "shape": "other shape"}


@dataclass(frozen=True)
class Row:
    """The outcome for one tensor, which both sides recorded or only one side.

    detail: why the tensor was not compared, or two values that are no tensors; EMPTY where both sides are equal, and
        are no tensor or hold no value.
    """

    key: Key
    status: Status
    mismatch: Mismatch | None = None
    detail: str = ""

    @property
    def operation(self) -> str:
        """Name the module that received or returned this tensor."""
        return re.sub(r"(^|\.)(inputs|output)(\..*)?$", "", self.key.name) or "the whole model"

    @property
    def is_output(self) -> bool:
        return re.search(r"(^|\.)output(\.|$)", self.key.name) is not None


@dataclass(frozen=True)
class Report:
    """The report of comparing two recordings.

    rows: one row a tensor, in execution order of A; tensors that A lacks come last.
    left_out: how many tensors of either side have no counterpart by the table of frameworks or the map.
    no_rows: how many values were not compared by token: texts, and tensors of which neither side has one row a token.
    early: how many values were not compared by token, since they were recorded before the first `input_ids`.
    tokens: how many pairs of tokens were compared; None where tensors were not matched by token.
    masked: how many tokens of a host's dump its loss mask leaves out.
    """

    a: Path
    b: Path
    rows: tuple[Row, ...]
    left_out: int = 0
    no_rows: int = 0
    early: int = 0
    tokens: int | None = None
    masked: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Count the rows of each status."""
        counted = Counter(row.status for row in self.rows)
        return {status: counted[status] for status in get_args(Status)}

    @property
    def exit_code(self) -> int:
        """Return the exit code: a difference outweighs what was not compared; no computed value is not equal."""
        if self.counts["different"]:
            return DIFFERENT
        return EQUAL if self.computed and len(self.rows) == self.counts["equal"] else NOT_COMPARABLE

    @property
    def computed(self) -> bool:
        """Whether any tensor with a value is more than what the model was handed."""
        return any(row.detail != EMPTY and not is_handed(row.key.name) for row in self.rows)

    @property
    def first(self) -> Row | None:
        """Return the first tensor, in execution order, in which both sides differ."""
        return next((row for row in self.rows if row.mismatch), None)

    @property
    def feeds(self) -> tuple[Row, ...]:
        """Return the recorded and equal tensors from which the first diverging tensor was computed.

        These are the inputs of the tensor's module. Where no module computed the tensor (a residual sum, attention in
        a function), they are the latest equal outputs under its parent, or else the latest equal tensor.
        """
        first = self.first
        if first is None:
            return ()
        before = takewhile(lambda row: row is not first, self.rows)
        equal = [row for row in before if row.status == "equal" and row.detail != EMPTY]
        call = [row for row in equal if _call(row.key) == _call(first.key)]
        parent = first.operation.rpartition(".")[0]
        inputs = f"{first.operation}.inputs"
        own = [row for row in call if first.is_output and row.key.name.startswith(inputs)]
        beside = [row for row in call if row.is_output and row.key.name.startswith(f"{parent}.")]
        return tuple(own or beside[-NEAREST:] or equal[-1:])


def compare(a: Recording, b: Recording, names: Correspondence, heads: Heads | None = None) -> Report:
    """Compare every tensor of A with its counterpart in B; one pair is loaded at a time."""
    left, right = renamed(a, names.a, heads), renamed(b, names.b, heads)
    keys = progress([*dict.fromkeys((*left, *right))], "tensors compared")
    return Report(
        a.path,
        b.path,
        rows=tuple(row_of(key, left.get(key), right.get(key), names.regroup) for key in keys),
        left_out=left_out(a, names.a) + left_out(b, names.b),
        masked=a.masked,
    )


def compare_log_probs(key: Key, a: LogProbRecord, b: LogProbRecord) -> Row:
    """Compare two records of log-probs, which must hold equal tokens, lengths and versions of the weights.

    Records with a token that lacks a log-prob on either side are not equal: neither NaN nor -9999 is taken for one.
    """
    for name in ("tokens", "cu_seqlens", "versions"):
        if mismatch := first_mismatch(a.tensors[name], b.tensors[name]):
            return Row(key, "not comparable", detail=f"not the same {name}: {mismatch}")
    if a.prompts and b.prompts and a.prompts != b.prompts:
        return Row(key, "not comparable", detail="not the same prompts")
    if not len(a.tokens):
        return Row(key, "not comparable", detail="no token is recorded")
    marks = [absent(side.log_probs) for side in (a, b)]
    missing = marks[0] | marks[1]
    left, right = (side.log_probs.where(~missing, 0) for side in (a, b))
    mismatch = first_mismatch(left, right, a.cu_seqlens)
    if mismatch is None and missing.any():
        where = coordinate(int(missing.int().argmax()), missing.shape, a.cu_seqlens)
        without = f"A {marks[0].sum()}, B {marks[1].sum()} of {len(a.tokens)} tokens"
        return Row(key, "not comparable", detail=f"without a log-prob: {without}; first at {list(where)}")
    return verdict(key, mismatch)


def left_out(recording: Recording, renaming: Renaming) -> int:
    """Count the entries without a common name."""
    return sum(not renaming.of(entry.key.name) for entry in recording.entries)


def renamed(recording: Recording, renaming: Renaming, heads: Heads | None) -> dict[Key, Entry]:
    """Return the entries that have a common name, by their keys under that name.

    Between two frameworks, entries that activation checkpointing recomputed are left out.
    """
    entries = (
        Entry(replace(entry.key, name=name), partial(_part, entry, part, heads))
        for entry in recording.entries
        for name, part in renaming.of(entry.key.name)
        if renaming.rest or not entry.key.recompute
    )
    return {entry.key: entry for entry in numbered(entries)}


def _part(entry: Entry, part: str | None, heads: Heads | None) -> Value:
    value = entry.load()
    if not part or not isinstance(value, Tensor):
        return value
    try:
        return PARTS[part](value, heads)
    except (IndexError, RuntimeError) as error:
        raise RecordError(f"{entry.key}: shape {list(value.shape)} has no part {part}") from error


def row_of(key: Key, a: Entry | None, b: Entry | None, regroup: bool) -> Row:
    """Compare one pair of entries."""
    try:
        values = [entry.load() for entry in (a, b) if entry]
    except RecordError as error:
        return Row(key, "not comparable", detail=str(error))
    if a is None or b is None:
        return Row(key, "missing in A" if a is None else "missing in B")
    return _compared(key, values[0], values[1], regroup)


def _compared(key: Key, a: Value, b: Value, regroup: bool) -> Row:
    if isinstance(a, LogProbRecord) and isinstance(b, LogProbRecord):
        return compare_log_probs(key, a, b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        row = verdict(key, first_mismatch(a, regrouped(a, b) if regroup else b))
        return row if a.numel() or row.mismatch else replace(row, detail=EMPTY)
    if type(a) is not type(b):
        return Row(key, "not comparable", detail=f"{type(a).__name__} against {type(b).__name__}")
    if repr(a) == repr(b):
        return Row(key, "equal", detail=EMPTY)
    letter = len(os.path.commonprefix([repr(a), repr(b)]))
    where = f", from letter {letter}" if shown(a) == shown(b) else ""
    return Row(key, "different", detail=f"{shown(a)} against {shown(b)}{where}")


def verdict(key: Key, mismatch: Mismatch | None) -> Row:
    return Row(key, DIVERGED[mismatch.kind], mismatch) if mismatch else Row(key, "equal")


def _call(key: Key) -> Key:
    """Return a key without name and layer, which is equal for all tensors of one call of a model."""
    return replace(key, name="", layer_id="")
