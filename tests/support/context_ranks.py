"""What the context ranks of the Megatron trainer compute, left in a folder as `RANKS-DTYPE/RANK.pt`.

    python context_ranks.py FOLDER

A process of its own: ranks are forked after the import of Megatron, before autograd has threads that a fork would lose.
"""

import sys
from pathlib import Path

import torch
from launch import run_ranks
from torch import Tensor

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


def computed(dtype: str, folder: Path) -> dict[str, list[Tensor]]:
    trainer = Megatron(folder / dtype, dtype, ORDERS["sglang"])
    with pinned(Contract(dtype=dtype)):
        logits = trainer.logits(SEQUENCES)
        return {"logits": [rows.detach().clone() for rows in logits], "gradients": gradients(trainer, logits)}


if __name__ == "__main__":
    for dtype in DTYPES:
        tiny(folder := Path(sys.argv[1]), dtype)
        for ranks in RANKS:
            (place := folder / f"{ranks}-{dtype}").mkdir()
            run_ranks(ranks, ranks, lambda _, dtype=dtype: computed(dtype, folder), place, limit_s=200)
