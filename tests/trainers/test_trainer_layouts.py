"""The Megatron trainer has the same bits packed, padded, cut over context ranks, in training and recomputed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from alignments import padded_logits
from context_ranks import DTYPES, RANKS, SEQUENCES, gradients, tiny
from tolerances import gradient_rtol
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.kernels.pin import pinned
from true_on_policy.trainers.attention import in_order, zigzag
from true_on_policy.trainers.megatron import Megatron

ROOT = Path(__file__).parents[2]
RANKS_PROGRAM = ROOT / "tests" / "support" / "context_ranks.py"

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def alone(trainer: Megatron) -> list[Tensor]:
    return [logits.detach() for sequence in SEQUENCES for logits in trainer.logits([sequence])]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
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
        expected = alone(trainer)
        trainer.model.train()
        kept = trainer.logits(SEQUENCES)
        again = recomputed(trainer.logits, SEQUENCES, use_reentrant=False)
        assert same(expected, kept) and same(expected, again)
        left, right = gradients(trainer, kept), gradients(trainer, again)
    assert same(left, right)
    assert len(left) == len(list(trainer.model.parameters()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in left)


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, RANKS_PROGRAM, folder], env=environment, check=True, timeout=240)
    return folder


@each_dtype
@pytest.mark.parametrize("ranks", RANKS)
def test_context_ranks_have_the_bits_of_one(ranks_folder: Path, dtype: str, ranks: int):
    trainer = Megatron(ranks_folder / dtype, dtype, ORDERS["sglang"])
    with pinned(Contract(dtype=dtype)):
        expected = alone(trainer)
        wanted = gradients(trainer, trainer.logits(SEQUENCES))
    made = [torch.load(ranks_folder / f"{ranks}-{dtype}/{rank}.pt") for rank in range(ranks)]
    assert all(same(expected, rank["logits"]) for rank in made)
    # Every rank holds the whole loss, so each gradient is counted once a rank; their parts add up in another order.
    for one, parts in zip(wanted, zip(*(rank["gradients"] for rank in made), strict=True), strict=True):
        total = torch.stack([part.float() for part in parts]).sum(0) / ranks
        assert (total - one.float()).norm() <= gradient_rtol(DTYPES[dtype]) * one.float().norm()


def test_zigzag_and_back():
    whole = torch.arange(24)
    parts = torch.stack([whole[zigzag(24, rank, 3)] for rank in range(3)])
    assert parts[0].tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    assert in_order(parts).tolist() == whole.tolist()
