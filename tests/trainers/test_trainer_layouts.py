"""The Megatron trainer has the same bits packed, padded, cut over ranks, in training and recomputed.

Over context-parallel ranks the bits are those of one rank; over tensor-parallel ranks they are on a tree, and are not
with ordinary sums.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from alignments import padded_logits
from commands import ran
from tolerances import gradient_rtol
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed
from trainer_ranks import CASES, SEQUENCES, SPLIT, TENSOR, Case, gradients, tiny

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.kernels.pin import pinned
from true_on_policy.trainers.attention import in_order, zigzag
from true_on_policy.trainers.megatron import Megatron

Rank = dict[str, dict]  # by case
Made = dict[tuple[int, int], list[Rank]]

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def named(layout: tuple[int, int]) -> str:
    return f"tp{layout[0]}-cp{layout[1]}"


each_split = pytest.mark.parametrize("layout", SPLIT, ids=named)


def alone(trainer: Megatron) -> list[Tensor]:
    return [logits.detach() for sequence in SEQUENCES for logits in trainer.logits([sequence])]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    return all(equal_bits(a.contiguous(), b.contiguous()) for a, b in zip(left, right, strict=True))


@each_dtype
def test_packed_and_padded_are_alone_where_stock_kernels_differ(tmp_path: Path, dtype: str):
    trainer = Megatron(tiny(tmp_path, dtype), dtype, ORDERS["sglang"])
    if dtype == "fp32":
        assert not same(alone(trainer), trainer.logits(SEQUENCES))
    with pinned(Contract(dtype=dtype)):
        assert same(alone(trainer), trainer.logits(SEQUENCES))
        assert same(alone(trainer), padded_logits(trainer, SEQUENCES))


@each_dtype
def test_training_and_recompute_have_the_bits_of_evaluation(tmp_path: Path, dtype: str):
    trainer = Megatron(tiny(tmp_path, dtype), dtype, ORDERS["sglang"])
    with pinned(Contract(dtype=dtype)):
        with torch.no_grad():
            expected = alone(trainer)
        trainer.model.train()
        kept = trainer.logits(SEQUENCES)
        again = recomputed(trainer.logits, SEQUENCES, use_reentrant=False)
        assert same(expected, kept) and same(expected, again)
        left, right = gradients(trainer, kept), gradients(trainer, again)
    assert left.keys() == right.keys() and same(left.values(), right.values())
    assert len(left) == len(list(trainer.model.parameters()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in left.values())


def test_zigzag_and_back():
    whole = torch.arange(24)
    parts = torch.stack([whole[zigzag(24, rank, 3)] for rank in range(3)])
    assert parts[0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    assert in_order(parts).tolist() == whole.tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """What every rank of every layout computed."""
    folder = tmp_path_factory.mktemp("ranks")
    done = ran("tests/support/trainer_ranks.py", folder)
    assert done.returncode == 0, done.stderr
    return {
        (tensor, context): [torch.load(folder / f"{tensor}x{context}/{rank}.pt") for rank in range(tensor * context)]
        for tensor, context in ((1, 1), *SPLIT)
    }


def cases(layout: tuple[int, int], holds: bool) -> list[Case]:
    """The cases of a layout whose ranks are to have the bits of one, or are not."""
    return [case for case in CASES if layout in case.layouts and case.holds(layout) == holds]


@each_split
def test_on_a_tree_or_over_context_alone_every_rank_has_the_bits_of_one(made: Made, layout: tuple[int, int]):
    assert {case.dtype for case in cases(layout, True)} == set(DTYPES)
    assert layout not in TENSOR or {case.order for case in cases(layout, True)} == set(ORDERS)
    for case in cases(layout, True):
        whole = made[1, 1][0][str(case)]["logits"]
        assert all(same(rank[str(case)]["logits"], whole) for rank in made[layout]), case


@pytest.mark.parametrize("layout", TENSOR, ids=named)
def test_ordinary_sums_differ(made: Made, layout: tuple[int, int]):
    """The control: the same kernels, each rank's product rounded and added by all-reduce."""
    assert cases(layout, False)
    for case in cases(layout, False):
        whole = made[1, 1][0][str(case)]["logits"]
        assert not any(same(rank[str(case)]["logits"], whole) for rank in made[layout]), case


@each_split
def test_gradients_are_those_of_one_rank(made: Made, layout: tuple[int, int]):
    """Up to rounding: a column-parallel layer and the parts of context ranks add up in another order."""
    for case in cases(layout, True):
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
    """A rank's share of what one rank holds of a parameter, said once more and otherwise than in `Shard`."""
    if gradient.dim() == 1:
        return gradient.unflatten(0, (ranks, -1))[rank] if "linear_qkv" in name else gradient
    if "linear_proj" in name or "linear_fc2" in name:
        return gradient.unflatten(1, (ranks, -1))[:, rank]
    if "linear_fc1" in name:
        return gradient.unflatten(0, (2, ranks, -1))[:, rank].flatten(0, 1)
    rows = -(-len(gradient) // ranks)
    share = gradient[rank * rows : (rank + 1) * rows]
    return torch.cat([share, share.new_zeros(rows - len(share), share.shape[1])])
