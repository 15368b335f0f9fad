"""The micro-batches of a host's dump, which both hosts list alike: indices of responses, one list a micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mis_plugins.report.record import Packing, Record
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.numerals import shown

Packings = dict[Any, Packing]  # by a name of the response


def packings(
    data: Mapping[str, Any], shard: int, rollouts: Any, valid: Any, names: Iterable[Any]
) -> Packings:
    """Packing of each response of one data-parallel rank; empty where the dump does not list its micro-batches.

    Args:
        data: holds `num_microbatches` of each optimizer step, and `micro_batch_indices` of all of them.
        rollouts: rollouts of each optimizer step.
        valid: valid tokens of the rollout of each response.
        names: name of each response of this rank.

    Raises:
        RecordError: the optimizer steps promise another number of micro-batches than are listed.
    """
    counts, indices, names = data.get("num_microbatches"), data.get("micro_batch_indices"), [*names]
    if not (isinstance(counts, list) and isinstance(indices, list) and isinstance(rollouts, list)):
        return {}
    if len(counts) != len(rollouts):
        return {}
    if sum(map(int, counts)) != len(indices):
        raise RecordError(
            f"num_microbatches promises {shown(sum(counts))} and micro_batch_indices has {len(indices)}"
        )
    steps = [step for step, count in enumerate(counts) for _ in range(int(count))]
    found: Packings = {}
    for number, (step, places) in enumerate(zip(steps, indices, strict=True)):
        for place in places:
            if not 0 <= place < min(len(names), len(valid)):
                return {}
            found[names[place]] = Packing(step, (shard, number), int(rollouts[step]), float(valid[place]))
    return found


def in_order(records: Iterable[tuple[Any, Record]], packed: Packings) -> Iterator[Record]:
    """Records with their packing, micro-batch by micro-batch; in the given order where one has no packing."""
    held = [replace(record, packing=packed.get(name)) for name, record in records]
    known = [(record.packing, place) for place, record in enumerate(held) if record.packing is not None]
    yield from (held[place] for _, place in sorted(known)) if len(known) == len(held) else held
