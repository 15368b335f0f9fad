"""Ranks that read different config files would mix two corrections of one sequence, and nobody would see it."""

from __future__ import annotations

import functools
import hashlib

import torch
import torch.distributed as dist

from mis_plugins.config import CorrectionConfig
from mis_plugins.errors import ConfigError


@functools.cache
def check_agreement(config: CorrectionConfig, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare the config with those of the ranks that hold the same sequences: once a config, at first use.

    The only wait for the device, and the only collective of a config that needs none. Not over data-parallel ranks:
    a fault-tolerant host replaces those one by one, and a new one would wait alone.

    Raises:
        ConfigError: on every rank of the group alike.
    """
    if group is None:
        return
    digests = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(digests, torch.tensor([_digest(config)], device=device), group=group)
    if len(set(digests.tolist())) > 1:
        raise ConfigError(f"context-parallel ranks have different mis configs; this one has {config}")


def _digest(config: CorrectionConfig) -> int:
    return int.from_bytes(hashlib.sha256(repr(config).encode()).digest()[:8], signed=True)
