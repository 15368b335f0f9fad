"""Dumps as Miles, slime and vime write them: ranks, context-parallel pieces, copies and stages without log-probs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mis_plugins.packing.layout import zigzag
from mis_plugins.report.record import Record

PROMPT = 5


def columns(records: Sequence[Record]) -> dict[str, Any]:
    """A host's columns of whole responses."""
    prompt = torch.arange(PROMPT)
    return {
        "tokens": [torch.cat([prompt, _tokens(record)]) for record in records],
        "total_lengths": [record.size + PROMPT for record in records],
        "response_lengths": [record.size for record in records],
        "loss_masks": [record.loss_mask.int() for record in records],
        "rewards": [0.0] * len(records),
        "sample_indices": [int(record.sample) for record in records],
        "rollout_log_probs": [record.behavior_log_probs for record in records],
        "log_probs": [record.proximal_log_probs for record in records],
        "advantages": [torch.ones(record.size) for record in records],
    }


def _tokens(record: Record) -> torch.Tensor:
    return torch.zeros(record.size, dtype=torch.int64) if record.tokens is None else record.tokens


def write_miles(folder: Path, records: Sequence[Record], cp: int = 2, first_rank: int = 0) -> None:
    """One rollout of Miles: for each context-parallel rank a first pipeline stage, the last one, and a copy of it."""
    rank = first_rank
    for cp_rank in range(cp):
        whole = columns(records)
        layout = zigzag(whole["total_lengths"], whole["response_lengths"], cp, cp_rank)
        spans = [layout.pieces(place) for place in range(len(records))]
        for name in ("rollout_log_probs", "log_probs", "advantages"):
            whole[name] = [
                torch.cat([x[low:high] for low, high in pieces]) for x, pieces in zip(whole[name], spans, strict=True)
            ]
        first_stage = {name: column for name, column in whole.items() if name not in ("log_probs", "advantages")}
        for data in (first_stage, whole, whole):
            _save(
                folder / "train_data" / f"{records[0].step}_{rank}.pt",
                {"rollout_id": records[0].step, "rank": rank, "rollout_data": data, "cp_rank": cp_rank,
                 "cp_size": cp, "qkv_format": "thd"},
            )  # fmt: skip
            rank += 1


def write_vime(folder: Path, records: Sequence[Record]) -> None:
    """One rollout of vime: slime's rows, in a file whose name has the rank that writes it."""
    write_slime(folder, records, f"{records[0].step}_0")


def write_slime(folder: Path, records: Sequence[Record], name: str | None = None) -> None:
    """One rollout of slime: samples in rows."""
    whole = columns(records)
    samples = [
        {name: column[place] for name, column in whole.items() if name != "sample_indices"}
        | {"sample_index": whole["sample_indices"][place], "rollout_position": place, "data_parallel_rank": 0}
        for place in range(len(records))
    ]
    shard = {"data_parallel_rank": 0, "partition": [*range(len(records))]}
    content = {"format_version": 2, "rollout_id": records[0].step, "rank": 0, "samples": samples, "dp_shards": [shard]}
    _save(folder / "train_data" / f"{name or records[0].step}.pt", content)


def write_rollout(folder: Path, records: Sequence[Record], foreign: Any = None) -> None:
    """The rollout's own dump, which both hosts write alike; `foreign` may be an object of any class."""
    samples = [
        {"index": int(record.sample), "status": "truncated" if place else "completed", "reward": float(place),
         "weight_versions": ["3"], "rollout_routed_experts": foreign,
         "tokens": torch.cat([torch.arange(PROMPT), _tokens(record)]).tolist()}
        for place, record in enumerate(records)
    ]  # fmt: skip
    _save(folder / "rollout_data" / f"{records[0].step}.pt", {"rollout_id": records[0].step, "samples": samples})


def _save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
