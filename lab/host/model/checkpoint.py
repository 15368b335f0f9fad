"""Checkpoints: whole weights and optimizer moments under Hugging Face names, for any layout of ranks to resume."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.host.folders import CHECKPOINT
from lab.host.model.decoder import ModelConfig
from lab.host.train.trainer import Trainer
from mis_plugins.errors import ConfigError
from mis_plugins.shared.files import replaced


def save(folder: str, trainer: Trainer, config: ModelConfig, next_rollout: int) -> None:
    """Write the state before rollout `next_rollout`. Collective."""
    record = {
        "model": asdict(config),
        "next_rollout": next_rollout,
        "weights": trainer.weights(),
        "optimizer": trainer.optimizer_state(),
    }
    if dist.get_rank() == 0:
        with replaced(Path(folder) / CHECKPOINT) as partial:
            torch.save(record, partial)
    dist.barrier()


def load(folder: str, config: ModelConfig) -> dict[str, Any]:
    """Read what :func:`save` wrote.

    Raises:
        ConfigError: there is no checkpoint, or it holds a model of another shape.
    """
    path = Path(folder) / CHECKPOINT
    if not path.is_file():
        raise ConfigError(f"--load {folder}: no {CHECKPOINT} there; give the folder that --save wrote")
    record = torch.load(path, weights_only=True)
    differing = [key for key, value in asdict(config).items() if record["model"].get(key) != value]
    if differing:
        raise ConfigError(f"--load {folder}: the checkpoint differs from this run in {', '.join(differing)}")
    return record
