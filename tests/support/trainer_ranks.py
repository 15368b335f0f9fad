"""What the ranks of the Megatron trainer compute, left in a folder as `TPxCP/RANK.pt`.

    python trainer_ranks.py FOLDER

A process of its own: ranks are forked after the import of Megatron, before autograd has threads that a fork would lose.
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

TENSOR, CONTEXT = ((2, 1), (4, 1), (2, 2)), ((1, 2), (1, 4))  # tensor- and context-parallel ranks
SPLIT = (*TENSOR, *CONTEXT)
SEQUENCES = [[(7 * i + n) % 300 + 2 for i in range(length)] for n, length in enumerate((5, 33, 1, 130, 64))]


@dataclass(frozen=True)
class Case:
    """What is computed on one rank, and on every layout that fits the model."""

    model: str
    dtype: str
    order: str
    leaves: int

    @property
    def layouts(self) -> tuple[tuple[int, int], ...]:
        """The tied model has six heads, and 333 tokens, which no two ranks share evenly."""
        if self.model == "tiny-qwen3-tied":
            return TENSOR[:1]
        return SPLIT if (self.order, self.leaves) == ("sglang", 1) else TENSOR

    def holds(self, layout: tuple[int, int]) -> bool:
        """Whether the ranks are to have the bits of one: without a tree tensor-parallel ranks have not."""
        return self.leaves > 1 or layout[0] == 1


CASES = [
    *(Case("tiny-qwen3", dtype, order, leaves) for dtype in DTYPES for order in ORDERS for leaves in (1, 4)),
    *(Case("tiny-qwen3-tied", dtype, "sglang", leaves) for dtype in DTYPES for leaves in (1, 4)),
    *(Case(model, dtype, "sglang", 4) for model in ("tiny-llama", "tiny-qwen2.5") for dtype in DTYPES),
]


def tiny(folder: Path, dtype: str, model: str = "tiny-qwen3") -> Path:
    return checkpoint(model, folder / model / dtype, DTYPES[dtype], seed=0)


def gradients(trainer: Megatron, logits: list[Tensor]) -> dict[str, Tensor]:
    """Of a loss that is a sum over tokens, by Megatron's name, as a rank holds them before anything is reduced."""
    trainer.model.zero_grad()
    # Backward of what Megatron gathers where ranks outnumber query groups; it asks for a GPU, as RoPE does in forward.
    with patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        torch.stack([rows.float().logsumexp(-1).sum() for rows in logits]).sum().backward()
    named = trainer.model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def compute(case: Case, layout: tuple[int, int], folder: Path) -> dict:
    contract = Contract(dtype=case.dtype, leaves=case.leaves)
    trainer = Megatron(folder / case.model / case.dtype, case.dtype, ORDERS[case.order], agreed_tree(contract))
    with pinned(contract):
        logits = trainer.logits(SEQUENCES)
        made = gradients(trainer, logits) if case.holds(layout) else {}
    return {"logits": [rows.detach().contiguous() for rows in logits], "gradients": made}


def computed(layout: tuple[int, int], folder: Path) -> dict[str, dict]:
    return {str(case): compute(case, layout, folder) for case in CASES if layout in ((1, 1), *case.layouts)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for model, dtype in {(case.model, case.dtype) for case in CASES}:
        tiny(folder, dtype, model)
    for tensor, context in ((1, 1), *SPLIT):
        (place := folder / f"{tensor}x{context}").mkdir()
        work = partial(lambda layout, _: computed(layout, folder), (tensor, context))
        run_ranks(tensor * context, context, work, place, limit_s=200, tensor_model_parallel_size=tensor)
