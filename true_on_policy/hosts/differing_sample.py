"""Write the first sample whose log-probs differ, in files that `python -m true_on_policy diff` reads.

    engine.safetensors   the engine's log-probs of one sequence, a record of log-probs (diff/log_prob_record.py)
    trainer.safetensors  the trainer's log-probs of this sequence
    sample.safetensors   tokens [L] of prompt and response; loss_mask [R] of the response; positions [T] of the recorded
                         tokens in the response

The records hold the valid tokens that lie on this rank. A host hands its loss no weight versions, so `versions` is -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mis_plugins.packing.transfer import Arrival, to_host
from mis_plugins.shared.arrays import save_safetensors
from mis_plugins.shared.opened import optional
from true_on_policy.diff.log_prob_record import LogProbRecord, provenance
from true_on_policy.hosts.micro_batch import MicroBatch

NO_VERSION = -1


def check_writable() -> None:
    """Check that a differing sample could be written; the first micro-batch asks, not the first difference.

    Raises:
        RecordError: safetensors is not installed.
    """
    optional("safetensors.torch")


def write_sample(
    batch: MicroBatch, sequence: int, folder: Path, metadata: Mapping[str, str]
) -> tuple[Path, Path]:
    """Write one sequence of a micro-batch, and return the two files to compare.

    Raises:
        RecordError, OSError: a file cannot be written, for lack of room for example.
    """
    ends = batch.ends()
    mine = slice(ends[sequence], ends[sequence + 1])
    engine, trainer, valid = (x[mine] for x in batch.on_host())
    tokens, loss_mask = (to_host(x[sequence]) for x in (batch.tokens, batch.loss_masks))
    Arrival.of_copies_from(batch.loss_masks[sequence]).wait()
    positions = torch.tensor(batch.positions(sequence), dtype=torch.int64)[valid]
    response = tokens[len(tokens) - len(loss_mask) :].to(torch.int64)
    whole = {"tokens": tokens.to(torch.int64), "loss_mask": loss_mask, "positions": positions}
    save_safetensors(folder / "sample.safetensors", whole)
    header = {**metadata, **provenance()}
    for name, log_probs in (("engine", engine), ("trainer", trainer)):
        LogProbRecord(
            tokens=response[positions],
            log_probs=log_probs[valid],
            versions=torch.full((len(positions),), NO_VERSION),
            cu_seqlens=torch.tensor([0, len(positions)]),
            metadata={**header, "side": name},
        ).save(folder / f"{name}.safetensors")
    return folder / "engine.safetensors", folder / "trainer.safetensors"
