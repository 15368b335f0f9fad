"""On a tree Megatron-core has the bits of one rank on 1, 2 and 4 tensor-parallel ranks; ordinary sums have not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensor_ranks import CASES, LAYOUTS, Case
from tolerances import gradient_rtol
from torch import Tensor

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES
from true_on_policy.contract.rounding import ORDERS

ROOT = Path(__file__).parents[2]
RANKS_PROGRAM = ROOT / "tests" / "support" / "tensor_ranks.py"
Rank = dict[str, dict]  # by case
Made = dict[tuple[int, int], list[Rank]]

each_split = pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: f"tp{layout[0]}-cp{layout[1]}")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What every rank of every layout computed."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, RANKS_PROGRAM, folder], env=environment, check=True, timeout=240)
    return {
        (tensor, context): [torch.load(folder / f"{tensor}x{context}/{rank}.pt") for rank in range(tensor * context)]
        for tensor, context in LAYOUTS
    }


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(equal_bits(a, b) for a, b in zip(left, right, strict=True))


@each_split
def test_on_a_tree_every_rank_has_the_bits_of_one(made: Made, layout: tuple[int, int]):
    cases = [case for case in CASES if case.leaves > 1 and layout in case.layouts]
    assert {case.dtype for case in cases} == set(DTYPES) and {case.order for case in cases} == set(ORDERS)
    for case in cases:
        whole = made[1, 1][0][str(case)]["logits"]
        assert all(same(rank[str(case)]["logits"], whole) for rank in made[layout]), case


@each_split
def test_ordinary_sums_differ(made: Made, layout: tuple[int, int]):
    """The control: the same kernels, each rank's product rounded and added by all-reduce."""
    cases = [case for case in CASES if case.leaves == 1 and layout in case.layouts]
    assert cases
    for case in cases:
        whole = made[1, 1][0][str(case)]["logits"]
        assert not any(same(rank[str(case)]["logits"], whole) for rank in made[layout]), case


@each_split
def test_gradients_are_those_of_one_rank(made: Made, layout: tuple[int, int]):
    """Up to rounding: a column-parallel layer adds its input gradients up in another order."""
    for case in (case for case in CASES if case.leaves > 1 and layout in case.layouts):
        whole = made[1, 1][0][str(case)]["gradients"]
        for name, gradient in whole.items():
            for rank in range(layout[0]):
                wanted = held(name, gradient.float(), rank, layout[0])
                ours = reduced(made[layout], case, name, rank, layout)
                assert (ours - wanted).norm() <= gradient_rtol(DTYPES[case.dtype]) * wanted.norm(), (case, name)


def reduced(ranks: list[Rank], case: Case, name: str, rank: int, layout: tuple[int, int]) -> Tensor:
    """A gradient after the sums that Megatron leaves to `finalize_model_grads`."""
    tensor, context = layout
    grids = [ranks[start : start + tensor] for start in range(0, tensor * context, tensor)]
    parts = [grid[rank][str(case)]["gradients"][name].float() for grid in grids]
    if "q_layernorm" in name or "k_layernorm" in name:  # each rank has seen its own heads alone
        parts = [one[str(case)]["gradients"][name].float() for grid in grids for one in grid]
    return torch.stack(parts).sum(0) / context  # every context rank holds the whole loss


def held(name: str, gradient: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's share of what one rank holds of a parameter, said once more and otherwise than in `shards`."""
    if gradient.dim() == 1:
        return gradient.unflatten(0, (ranks, -1))[rank] if "linear_qkv" in name else gradient
    if "linear_proj" in name or "linear_fc2" in name:
        return gradient.unflatten(1, (ranks, -1))[:, rank]
    if "linear_fc1" in name:
        return gradient.unflatten(0, (2, ranks, -1))[:, rank].flatten(0, 1)
    rows = -(-len(gradient) // ranks)
    share = gradient[rank * rows : (rank + 1) * rows]
    return torch.cat([share, share.new_zeros(rows - len(share), share.shape[1])])
