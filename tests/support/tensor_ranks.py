"""What the ranks of the Megatron trainer compute under tensor parallelism, left in a folder as `TPxCP/RANK.pt`.

    python tensor_ranks.py FOLDER

A process of its own, for the reason that `context_ranks` gives.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from launch import run_ranks
from torch import Tensor

from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.row_parallel import agreed_tree
from true_on_policy.models.tiny import checkpoint
from true_on_policy.trainers.megatron import Megatron

LAYOUTS = ((1, 1), (2, 1), (4, 1), (2, 2))  # tensor- and context-parallel ranks
SEQUENCES = [[(7 * i + n) % 300 + 2 for i in range(length)] for n, length in enumerate((5, 33, 1, 70))]


@dataclass(frozen=True)
class Case:
    """What is computed on every layout that fits the model."""

    model: str
    dtype: str
    order: str
    leaves: int

    @property
    def layouts(self) -> tuple[tuple[int, int], ...]:
        """The tied model has six heads, and 333 tokens, which no two ranks share evenly."""
        return LAYOUTS[:2] if self.model == "tiny-qwen3-tied" else LAYOUTS


CASES = [
    *(Case("tiny-qwen3", dtype, order, leaves) for dtype in DTYPES for order in ORDERS for leaves in (1, 4)),
    *(Case("tiny-qwen3-tied", dtype, "sglang", leaves) for dtype in DTYPES for leaves in (1, 4)),
    *(Case(model, dtype, "sglang", 4) for model in ("tiny-llama", "tiny-qwen2.5") for dtype in DTYPES),
]


def gradients(trainer: Megatron, logits: list[Tensor]) -> dict[str, Tensor]:
    """Of a loss that is a sum over tokens, by Megatron's name, as a rank holds them before anything is reduced."""
    # Backward of what Megatron gathers where ranks outnumber query groups; it asks for a GPU, as RoPE does in forward.
    with patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        torch.stack([rows.float().logsumexp(-1).sum() for rows in logits]).sum().backward()
    named = trainer.model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def compute(case: Case, folder: Path) -> dict:
    contract = Contract(dtype=case.dtype, leaves=case.leaves)
    path = folder / case.model / case.dtype
    trainer = Megatron(path, case.dtype, ORDERS[case.order], agreed_tree(contract))
    with pinned(contract):
        logits = trainer.logits(SEQUENCES)
        made = gradients(trainer, logits) if case.leaves > 1 else {}
    return {"logits": [rows.detach().contiguous() for rows in logits], "gradients": made}


def computed(layout: tuple[int, int], folder: Path) -> dict[str, dict]:
    return {str(case): compute(case, folder) for case in CASES if layout in case.layouts}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for model in {case.model for case in CASES}:
        for dtype in DTYPES:
            checkpoint(model, folder / model / dtype, DTYPES[dtype], seed=0)
    for tensor, context in LAYOUTS:
        (place := folder / f"{tensor}x{context}").mkdir()
        work = partial(lambda layout, _: computed(layout, folder), (tensor, context))
        run_ranks(tensor * context, context, work, place, limit_s=200, tensor_model_parallel_size=tensor)
