"""Ranks that read different config files would hang in each other's collectives, or mix two corrections silently."""

from __future__ import annotations

import functools
import hashlib

import torch
import torch.distributed as dist

from mis_plugins.config import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.ragged import Ranks


@functools.cache
def check_agreement(config: CorrectionConfig, ranks: Ranks, device: torch.device) -> None:
    """Compare the config with those of the ranks it will communicate with: once a config, at first use.

    The only wait for the device, and the only collective of a config that needs none.

    Raises:
        ConfigError: on every rank of the group alike.
    """
    by_data = config.weight and config.weight.normalize and config.weight.normalize.scope == "data_parallel"
    for name, group in (("context", ranks.cp), ("data", ranks.dp if by_data else None)):
        if group is not None and len(set(_gather(_digest(config), group, device))) > 1:
            raise ConfigError(
                f"ranks of one {name}-parallel group have different mis configs; this one has {config}"
            )


def _digest(config: CorrectionConfig) -> int:
    return int.from_bytes(hashlib.sha256(repr(config).encode()).digest()[:8], signed=True)


def _gather(number: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    numbers = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(numbers, torch.tensor([number], device=device), group=group)
    return numbers.tolist()
