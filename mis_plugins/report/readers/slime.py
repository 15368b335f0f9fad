"""slime's training dump (`--save-debug-train-data`, `--dump-details`): one file a rollout, responses whole.

Read from slime 624b824: `{format_version: 2, rollout_id, rank, samples, dp_shards}`. The last pipeline stage of
tensor-parallel rank 0 writes it, after context-parallel pieces are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mis_plugins.report.readers import host
from mis_plugins.report.readers.packing import Packings, in_order, packings
from mis_plugins.report.readers.source import Problems
from mis_plugins.report.record import Record
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.foreign import tensor_of
from mis_plugins.shared.numerals import shown


def is_train_dump(content: Any) -> bool:
    """Whether a loaded file is slime's dump of training data."""
    return host.has_samples(content) and "dp_shards" in content


def records(
    content: Mapping[str, Any], label: str, extra: host.Extra, problems: Problems
) -> Iterator[Record]:
    """Records of one loaded dump; a sample that does not fit together is told and left out."""
    found: list[tuple[Any, Record]] = []
    for place, sample in enumerate(content["samples"]):
        index = sample.get("sample_index", sample.get("rollout_position", place))
        with problems.guarded(label, f"sample {shown(index)}"):
            found.append((_name(sample), host.record(sample, host.rollout_id(content), index, extra)))
    packed: Packings = {}
    with problems.guarded(label, "micro-batches"):
        packed = _packings(content)
    return in_order(found, packed)


def _name(sample: Mapping[str, Any]) -> tuple[Any, Any]:
    name = sample.get("data_parallel_rank"), sample.get("rollout_position")
    if not all(isinstance(number, int | None) for number in name):
        raise RecordError(
            f"data_parallel_rank and rollout_position: got {shown(name)}; expected whole numbers"
        )
    return name


def _packings(content: Mapping[str, Any]) -> Packings:
    """Packing of every response of which the dump tells the place in the rollout."""
    valid = {_name(sample): tensor_of(sample.get("rollout_mask_sums")) for sample in content["samples"]}
    found: Packings = {}
    for number, shard in enumerate(content["dp_shards"]):
        names = [(shard.get("data_parallel_rank"), place) for place in shard.get("partition") or ()]
        sums = [valid.get(name) for name in names]
        if None not in sums:
            found |= packings(shard, number, shard.get("global_batch_sizes"), sums, names)
    return found
