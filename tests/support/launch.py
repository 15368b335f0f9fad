"""Forks gloo ranks with real Megatron groups: importing megatron.core takes seconds, forking after it does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.multiprocessing.spawn import ProcessContext, start_processes

Work = Callable[[int], object]


def run_ranks(
    world: int, cp: int, work: Work, folder: Path, limit_s: float = 60.0, megatron: bool = True
) -> list:
    """`work(rank)` on every rank of a Megatron grid with context parallelism `cp`; their results, in rank order."""
    context = start_processes(
        _rank, args=(world, cp, work, folder, megatron), nprocs=world, start_method="fork", join=False
    )
    assert isinstance(context, ProcessContext)
    deadline = time.monotonic() + limit_s
    try:
        while not context.join(timeout=0.5):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{world} ranks did not end within {limit_s:g} s")
    finally:
        for process in context.processes:
            if process is not None:
                process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, cp: int, work: Work, folder: Path, megatron: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    if megatron:
        mpu.initialize_model_parallel(context_parallel_size=cp)
    torch.save(work(rank), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
