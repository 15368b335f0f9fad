"""What the context ranks of the Megatron trainer compute, left in a folder as `RANKS-DTYPE-RANK.pt`.

    python context_ranks.py FOLDER

A process of its own: ranks are forked after the import of Megatron, before autograd has threads that a fork would lose.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.kernels.pin import pinned
from true_on_policy.models.tiny import checkpoint
from true_on_policy.trainers.megatron import Megatron

RANKS = (2, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEQUENCES = [[(7 * i + n) % 300 + 2 for i in range(length)] for n, length in enumerate((5, 33, 1, 130, 64))]


def tiny(folder: Path, dtype: str) -> Path:
    return checkpoint("tiny-qwen3", folder / dtype, DTYPES[dtype], seed=0)


def gradients(trainer: Megatron, logits: list[Tensor]) -> list[Tensor]:
    """Of a loss that is a sum over tokens, by parameter."""
    trainer.model.zero_grad()
    torch.stack([rows.float().logsumexp(-1).sum() for rows in logits]).sum().backward()
    return [parameter.grad.clone() for parameter in trainer.model.parameters() if parameter.grad is not None]


def _rank(rank: int, ranks: int, dtype: str, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{ranks}-{dtype}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mpu.initialize_model_parallel(context_parallel_size=ranks)
    trainer = Megatron(folder / dtype, dtype, ORDERS["sglang"])
    with pinned(Contract(dtype=dtype)):
        logits = trainer.logits(SEQUENCES)
        made = {"logits": [rows.detach().clone() for rows in logits], "gradients": gradients(trainer, logits)}
    torch.save(made, folder / f"{ranks}-{dtype}-{rank}.pt")


if __name__ == "__main__":
    for dtype in DTYPES:
        tiny(Path(sys.argv[1]), dtype)
        for ranks in RANKS:
            arguments = (ranks, dtype, Path(sys.argv[1]))
            start_processes(_rank, arguments, nprocs=ranks, start_method="fork")
