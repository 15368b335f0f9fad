"""One optimizer step of a run, from what the host itself wrote: its dumps and its log."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = list[float]


@dataclass(frozen=True)
class Recorded:
    """A response of a dump: log-probs of both sides, advantages and the host's mask, one number a token.

    age: how many updates ago each token was written; None without versions.
    following: log pi_{v+1} of each token, None where it is not known; None without versions.
    """

    proximal: Row
    behavior: Row
    advantages: Row
    mask: list[bool]
    age: Sequence[int] | None = None
    following: Sequence[float | None] | None = None


MicroBatch = list[Recorded]
FIELDS = {"proximal": "log_probs", "behavior": "rollout_log_probs", "advantages": "advantages"}


def micro_batches(details: Path, rollout: int) -> list[MicroBatch]:
    """Read the micro-batches of a rollout that is one optimizer step, in the dump of either host."""
    whole = details / "train_data" / f"{rollout}.pt"
    if whole.exists():
        return list(_of_slime(_load(whole)))
    return list(_of_miles([_load(path) for path in sorted((details / "train_data").glob(f"{rollout}_*.pt"))]))


def _load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False, map_location="cpu")  # made by our own run a moment ago


def _of_slime(dump: Mapping[str, Any]) -> Iterator[MicroBatch]:
    samples = {
        (row["data_parallel_rank"], row["sample_index"], row["rollout_position"]): row for row in dump["samples"]
    }
    for shard in dump["dp_shards"]:
        mine = [row for (rank, _, _), row in samples.items() if rank == shard["data_parallel_rank"]]
        order = {index: place for place, index in enumerate(shard["sample_indices"])}
        mine.sort(key=lambda row: order[row["sample_index"]])
        for indices in shard["micro_batch_indices"]:
            yield [_of_the_sample(mine[i], shard.get("proximal_version")) for i in indices]


def _of_the_sample(row: Mapping[str, Any], version: int | None) -> Recorded:
    return _recorded(lambda key: row[key].double().tolist(), row["loss_masks"], version)


def _recorded(read: Callable[[str], Row], mask: Any, version: int | None) -> Recorded:
    """Make the record of a response.

    Args:
        read: returns the numbers of the response under a key of the dump.
        version: the trainer's version; None where the dump tells no versions.
    """
    own = {name: read(key) for name, key in FIELDS.items()}
    live = [bool(valid) for valid in mask.tolist()]
    age = following = None
    if version is not None:
        age = [version - int(wrote) for wrote in read("output_versions")]
        following = [None if math.isnan(x) else x for x in read("recomputed_log_probs")]
    return Recorded(**own, mask=live, age=age, following=following)


def _of_miles(ranks: Sequence[Mapping[str, Any]]) -> Iterator[MicroBatch]:
    """Join the context-parallel ranks of each shard; tensor-parallel ranks repeat one another."""
    shards: dict[tuple[int, ...], dict[int, Any]] = {}
    for rank in ranks:
        data = rank["rollout_data"]
        shards.setdefault(tuple(data["sample_indices"]), {}).setdefault(rank["cp_rank"], data)
    for parts in shards.values():
        data = parts[0]
        # On FSDP Miles does not dump its micro-batches.
        alone = [[i] for i in range(len(data["total_lengths"]))]
        for indices in data.get("micro_batch_indices", alone):
            yield [_joined(parts, i) for i in indices]


def _joined(parts: Mapping[int, Mapping[str, Any]], i: int) -> Recorded:
    from oracle import zigzag

    first = parts[0]
    total, response = first["total_lengths"][i], first["response_lengths"][i]

    def read(key: str) -> Row:
        row = [math.nan] * response
        for rank, data in parts.items():
            held = zigzag(total, response, len(parts), rank)
            for t, value in zip(held, data[key][i].double().tolist(), strict=True):
                row[t] = value
        return row

    version = first["proximal_version"] if "output_versions" in first else None
    return _recorded(read, first["loss_masks"][i], version)


STEP = re.compile(r"\bstep (\d+): (\{'train/.*\})")
ROLLOUT = re.compile(r"\brollout (\d+): (\{'rollout/.*\})")
PERF = re.compile(r"\bperf (\d+): (\{'perf/.*\})")
VERSION = re.compile(r"new_version='(\d+)'")


def logged(log: str, pattern: re.Pattern[str]) -> dict[int, dict[str, float]]:
    """Read the host's numbers of each step, or of each rollout, from its log."""
    found: dict[int, dict[str, float]] = {}
    for number, numbers in pattern.findall(log):
        found.setdefault(int(number), {}).update(_numbers(numbers))
    return found


def _numbers(text: str) -> dict[str, float]:
    mended = re.sub(r"(?<=: )(-?)(nan|inf)\b", r"\g<1>1e999", text)
    return {name: value for name, value in ast.literal_eval(mended).items() if isinstance(value, int | float)}


def versions(log: str) -> list[int]:
    """List the weight versions that the engine reported, in order."""
    return [int(version) for version in VERSION.findall(log)]
