"""A row-parallel product has the same bits on 1, 2 and 4 ranks, forward and backward; ordinary partial sums do not."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from other_backend import backwards
from tolerances import product_atol

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.errors import ContractError
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.row_parallel import Tree

DEPTH, COLUMNS, LEAVES = 176, 37, 4
KERNELS = {"native": nullcontext, "backwards": backwards}


def operands(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 5, DEPTH), (COLUMNS, DEPTH))
    x, weight = (torch.randn(size, generator=generator).to(DTYPES[dtype]) for size in sizes)
    return x, weight


def step(kernels: str, dtype: str, rank: int, ranks: int, group) -> list[torch.Tensor]:
    """Output and both gradients of this rank's share of K."""
    x, weight = (part.chunk(ranks, -1)[rank].contiguous().requires_grad_() for part in operands(dtype))
    with KERNELS[kernels](), pinned(Contract(dtype=dtype)):
        out = Tree(LEAVES).product(x, weight, group)
        gradients = torch.autograd.grad(out.float().square().sum(), (x, weight))
    return [out.detach(), *gradients]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_number_of_ranks_changes_no_bit(tmp_path, ranks):
    cases = [(kernels, dtype) for kernels in KERNELS for dtype in DTYPES]
    alone = [step(*case, 0, 1, None) for case in cases]

    def work(rank: int) -> list[list[torch.Tensor]]:
        return [step(*case, rank, ranks, dist.group.WORLD) for case in cases]

    for case, whole, *shares in zip(cases, alone, *run_ranks(ranks, 1, work, tmp_path, megatron=False), strict=True):
        out, *gradients = whole
        assert all(equal_bits(share[0], out) for share in shares), case
        if case[0] == "native":  # its columns do not notice each other, whatever their number
            for place, gradient in enumerate(gradients, 1):
                assert equal_bits(torch.cat([share[place] for share in shares], -1), gradient), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_partial_sums_differ(dtype):
    """The control: each rank's product rounded and added, as an all-reduce does."""
    x, weight = operands(dtype)
    with pinned(Contract(dtype=dtype)):
        whole = x @ weight.t()
        parts = [a @ b.t() for a, b in zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)]
    assert not equal_bits(parts[0] + parts[1], whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product(dtype):
    x, weight = operands(dtype)
    with pinned(Contract(dtype=dtype)):
        out = Tree(LEAVES).product(x, weight)
    error = (out.double() - x.double() @ weight.double().t()).abs()
    assert (error <= product_atol(x, weight.t())).all()


@pytest.mark.parametrize(
    ("leaves", "depth", "message"),
    [(3, 6, "leaves: got 3; choose a power of two"), (8, 12, "leaves: 8 a rank do not divide its K of 12")],
)
def test_leaves_that_do_not_fit(leaves, depth, message):
    with pytest.raises(ContractError, match=message):
        Tree(leaves).product(torch.ones(2, depth), torch.ones(3, depth))
