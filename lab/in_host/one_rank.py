"""Faults of rank 1 alone, planted for `--custom-megatron-init-path`: the job must end and say which rank it was."""

from __future__ import annotations

import copy
import time
from typing import Any, NoReturn

import torch.distributed as dist

from mis_plugins import mis


def has_another_config(args: Any) -> None:
    """Give rank 1 a bound of its own, as a file that differs between two machines does."""
    if dist.get_rank() == 1:
        args.mis = copy.deepcopy(args.mis)
        args.mis["weight"]["upper"] = 3.0


def fails(args: Any) -> None:
    """Let the hook of rank 1 fail before it meets other ranks."""

    def failing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("planted on rank 1")

    if dist.get_rank() == 1:
        mis.compute_mis_weights_with_cp = failing


def never_comes(args: Any) -> None:
    """Let the hook of rank 1 wait for longer than the job's time-out, as a process that hangs does."""
    if dist.get_rank() == 1:
        mis.compute_mis_weights_with_cp = lambda *_, **__: time.sleep(3600)
