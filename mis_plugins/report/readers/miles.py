"""Miles's training dump (`--save-debug-train-data`, `--dump-details`): one file a rollout and rank, in columns.

Read from Miles 31f1ca9: `{rollout_id, rank, rollout_data, cp_rank, cp_size, qkv_format}`. Context-parallel ranks hold
their zigzag pieces of per-token columns, tensor-parallel ranks hold copies, and pipeline stages before the last hold
no log-probs. Each column of a sample is put together from whichever ranks have it.

Samples may share an index: an agent's responses to one prompt are copies of one sample. A sample is therefore known by
its rank's list of samples and its place there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from mis_plugins.packing.layout import zigzag
from mis_plugins.report.readers import host
from mis_plugins.report.readers.packing import Packings, in_order, packings
from mis_plugins.report.readers.source import Problems
from mis_plugins.report.record import Record
from mis_plugins.shared.archive import Stored
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import tensor_of
from mis_plugins.shared.numerals import shown

PIECES = ("rollout_log_probs", "log_probs", "advantages")  # cut over context-parallel ranks
WHOLE = ("tokens", "loss_masks", "rewards", "truncated", "weight_versions")
LISTED = ("response_lengths", "total_lengths", "max_seq_lens", "sample_indices", "rollout_mask_sums")
COLUMNS = (*PIECES, *WHOLE, *LISTED, "num_microbatches", "micro_batch_indices", "num_rollouts")

# A digest, equal on all ranks that hold equal samples; without indices a number, and each rank's samples are its own.
Shard = bytes | int


@dataclass(frozen=True)
class Held:
    """One sample as one rank's file holds it."""

    rank: Mapping[str, Any]
    place: int

    def column(self, name: str) -> Any:
        """The sample's entry of a column; None where the rank has no such column."""
        column = self.rank["rollout_data"].get(name)
        holds = isinstance(column, list | tuple | Tensor) and len(column) > self.place
        return tensor_of(column[self.place]) if holds else None

    @property
    def cp_rank(self) -> int:
        return int(self.rank.get("cp_rank") or 0)

    @property
    def cp_size(self) -> int:
        return int(self.rank.get("cp_size") or 1)


def is_train_dump(content: Any) -> bool:
    """Whether a loaded file is one rank's part of Miles's training data."""
    if not isinstance(content, dict) or not isinstance(content.get("rollout_data"), dict):
        return False
    lengths = content["rollout_data"].get("response_lengths")
    return isinstance(lengths, list | tuple | Tensor | Stored) and "rank" in content


def records(
    ranks: Sequence[Mapping[str, Any]], label: str, extra: host.Extra, problems: Problems
) -> Iterator[Record]:
    """Records of one rollout from the files of all its ranks."""
    held: dict[tuple[Shard, int], list[Held]] = defaultdict(list)
    shards: dict[Shard, Mapping[str, Any]] = {}
    for number, rank in enumerate(_in_order(ranks, label, problems)):
        shard: Shard = number
        with problems.guarded(label, f"rank {rank['rank']}"):
            digest = _digest(rank["rollout_data"])
            shard = number if digest is None else digest
        shards[shard] = rank["rollout_data"]
        for place in range(len(rank["rollout_data"]["response_lengths"])):
            held[shard, place].append(Held(rank, place))
    found: list[tuple[Any, Record]] = []
    for name, parts in held.items():
        rank, place = parts[0].rank, parts[0].place
        with problems.guarded(label, f"rank {rank['rank']}, sample {place}"):
            index = parts[0].column("sample_indices")
            index = (rank["rank"], place) if index is None else index
            found.append((name, host.record(_joined(index, parts), host.rollout_id(rank), index, extra)))
    packed: Packings = {}
    with problems.guarded(label, "micro-batches"):
        packed = _packings(shards)
    return in_order(found, packed)


def _in_order(ranks: Sequence[Mapping[str, Any]], label: str, problems: Problems) -> list[Mapping[str, Any]]:
    """The files of all ranks by their number, each with the columns that are read; stacked columns are tensors."""
    known = []
    for rank in ranks:
        with problems.guarded(label, f"rank {shown(rank['rank'])}"):
            number = int(tensor_of(rank["rank"]))
            columns = {name: tensor_of(rank["rollout_data"].get(name)) for name in COLUMNS}
            known.append({**rank, "rank": number, "rollout_data": columns})
    return sorted(known, key=lambda rank: rank["rank"])


def _digest(data: Mapping[str, Any]) -> bytes | None:
    """A digest of the samples of a rank; None without indices."""
    if data.get("sample_indices") is None:
        return None
    digest = blake2b(repr([str(index) for index in data["sample_indices"]]).encode())
    for name in ("tokens", "loss_masks"):
        column = data.get(name)
        for value in () if column is None else column:
            digest.update(
                b"" if value is None else torch.as_tensor(tensor_of(value)).contiguous().numpy().tobytes()
            )
    return digest.digest()


def _packings(shards: Mapping[Shard, Mapping[str, Any]]) -> Packings:
    """Packing of every response. Ranks of other tensor, pipeline and context places repeat the lists of their shard."""
    found: Packings = {}
    for number, (shard, data) in enumerate(shards.items()):
        valid = data.get("rollout_mask_sums")
        names = [(shard, place) for place in range(len(data["response_lengths"]))]
        found |= packings(data, number, data.get("num_rollouts"), () if valid is None else valid, names)
    return found


def _joined(index: Any, parts: Sequence[Held]) -> dict[str, Any]:
    whole = {
        name: next((v for part in parts if (v := part.column(name)) is not None), None) for name in WHOLE
    }
    return whole | {name: _column(index, name, parts) for name in PIECES}


def _column(index: Any, name: str, parts: Sequence[Held]) -> Tensor | None:
    """One per-token column of a sample, from the pieces of all context-parallel ranks."""
    pieces = {part.cp_rank: (part, value) for part in parts if (value := part.column(name)) is not None}
    if not pieces:
        return None
    first, value = next(iter(pieces.values()))
    if first.cp_size == 1:
        return torch.as_tensor(value)
    if len(pieces) != first.cp_size:
        raise RecordError(
            f"sample {index}: {name} of {len(pieces)} of {first.cp_size} context-parallel ranks; name the files of all "
            "ranks"
        )
    return _from_pieces(index, name, {rank: (part, torch.as_tensor(v)) for rank, (part, v) in pieces.items()})


def _from_pieces(index: Any, name: str, pieces: Mapping[int, tuple[Held, Tensor]]) -> Tensor:
    part, value = next(iter(pieces.values()))
    total, response = int(part.column("total_lengths")), int(part.column("response_lengths"))
    padded = part.column("max_seq_lens") if part.rank.get("qkv_format") == "bshd" else None
    if response > sum(piece.numel() for _, piece in pieces.values()):
        raise RecordError(
            f"sample {index}: {name} of all context-parallel ranks is shorter than its response"
        )
    whole = value.new_zeros(response)
    for rank, (_, piece) in pieces.items():
        layout = zigzag([total], [response], part.cp_size, rank, None if padded is None else [int(padded)])
        if piece.numel() != layout.local_lengths[0]:
            raise RecordError(f"sample {index}: {name} of context-parallel rank {rank} is no zigzag piece")
        start = 0
        for low, high in layout.pieces(0):
            whole[low:high] = piece[start : start + high - low]
            start += high - low
    return whole
