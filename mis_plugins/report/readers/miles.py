"""Miles's training dump (`--save-debug-train-data`, `--dump-details`): one file a rollout and rank, in columns.

Read from Miles 31f1ca9: `{rollout_id, rank, rollout_data, cp_rank, cp_size, qkv_format}`. Context-parallel ranks hold
their zigzag pieces of per-token columns, tensor-parallel ranks hold copies, and pipeline stages before the last hold
no log-probs. Each column of a sample is put together from whichever ranks have it.

Samples may share an index: an agent's responses to one prompt are copies of one sample. A sample is therefore known by
its rank's list of samples and its place there.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from mis_plugins.errors import shown
from mis_plugins.packing.layout import zigzag
from mis_plugins.report.readers import host
from mis_plugins.report.readers.files import Problems
from mis_plugins.report.record import Record
from mis_plugins.shared.archive import Stored
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import tensor_of

PIECES = ("rollout_log_probs", "log_probs", "advantages")  # cut over context-parallel ranks
WHOLE = ("tokens", "loss_masks", "rewards", "truncated", "weight_versions")
LISTED = ("response_lengths", "total_lengths", "max_seq_lens", "sample_indices")


@dataclass(frozen=True)
class Held:
    """One sample as one rank's file holds it."""

    rank: Mapping[str, Any]
    place: int

    def column(self, name: str) -> Any:
        """The sample's entry of a column; None where the rank has no such column."""
        column = self.rank["rollout_data"].get(name)
        if not isinstance(column, list | tuple | Tensor):
            return None
        if len(column) <= self.place and name in (*PIECES, "loss_masks"):
            raise RecordError(f"{name} has {len(column)} entries, fewer than the rank has samples")
        return tensor_of(column[self.place]) if len(column) > self.place else None

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


def records(ranks: Sequence[Mapping[str, Any]], label: str, extra: host.Extra, problems: Problems) -> Iterator[Record]:
    """Records of one rollout from the files of all its ranks."""
    held: dict[tuple[bytes | int, int], list[Held]] = defaultdict(list)
    read = (problems.read(partial(_read, rank), label, f"rank {shown(rank['rank'])}") for rank in ranks)
    in_order = sorted((rank for rank in read if rank is not None), key=lambda rank: rank["rank"])
    for number, rank in enumerate(in_order):
        digest = problems.read(partial(_digest, rank["rollout_data"]), label, f"rank {rank['rank']}")
        shard = digest or number  # each rank's samples are its own where no index tells
        counted = (rank["rollout_data"][name] for name in ("response_lengths", "tokens"))
        for place in range(max(len(column) for column in counted if isinstance(column, list | tuple | Tensor))):
            held[shard, place].append(Held(rank, place))
    for parts in held.values():
        rank, place = parts[0].rank, parts[0].place
        if record := problems.read(partial(_record, parts, extra), label, f"rank {rank['rank']}, sample {place}"):
            yield record


def _record(parts: Sequence[Held], extra: host.Extra) -> Record:
    rank, place = parts[0].rank, parts[0].place
    index = parts[0].column("sample_indices")
    index = (rank["rank"], place) if index is None else index
    columns = dict.fromkeys(name for part in parts for name in part.rank["columns"])
    sample = {name: next((v for part in parts if (v := part.column(name)) is not None), None) for name in WHOLE}
    sample |= {name: _column(index, name, parts) for name in PIECES}
    return host.record(sample, host.rollout_id(rank), index, extra, columns)


def _read(rank: Mapping[str, Any]) -> dict[str, Any]:
    """The file of a rank with the columns that are read; stacked columns are tensors."""
    columns = {name: tensor_of(rank["rollout_data"].get(name)) for name in (*PIECES, *WHOLE, *LISTED)}
    return {**rank, "rank": int(tensor_of(rank["rank"])), "rollout_data": columns, "columns": [*rank["rollout_data"]]}


def _digest(data: Mapping[str, Any]) -> bytes | None:
    """A digest of the samples of a rank, equal on all ranks with equal samples; None without indices and tokens."""
    indices = data.get("sample_indices")
    if indices is None and data.get("tokens") is None:
        return None
    digest = blake2b(repr(None if indices is None else [str(index) for index in indices]).encode())
    for name in ("tokens", "loss_masks"):
        column = data.get(name)
        for value in () if column is None else column:
            digest.update(b"" if value is None else torch.as_tensor(tensor_of(value)).contiguous().numpy().tobytes())
    return digest.digest()


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
        raise RecordError(f"sample {index}: {name} of all context-parallel ranks is shorter than its response")
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
