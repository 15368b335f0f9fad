"""Every alignment left out breaks the chain: the trainer against an engine in the order of rounding of SGLang."""

from itertools import chain
from pathlib import Path

import pytest
from alignments import COMPLETE, CONTRACT, LEFT_OUT, OF_ROW, ORDER, equal_share, rows_of_the_page

from true_on_policy.engines.hf.engine import HuggingFace as Engine
from true_on_policy.engines.protocol import Sample
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.row_parallel import Tree
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.verify.workload import Workload

TREE = Tree(leaves=4)


def sample(tiny: Path, tree: Tree | None) -> list[Sample]:
    with pinned(CONTRACT):
        batches = Workload(320, seed=0).sample(Engine(tiny, "bf16", ORDER, tree).generate, 150)
    return [*chain.from_iterable(batches)]


@pytest.fixture(scope="module")
def sampled(tiny: Path) -> list[Sample]:
    return sample(tiny, None)


@pytest.mark.parametrize("what", COMPLETE)
def test_with_all_of_them_every_log_prob_is_the_engines(sampled, tiny, what):
    assert equal_share(sampled, COMPLETE[what](tiny, sampled)) == 1.0


@pytest.mark.parametrize("what", LEFT_OUT)
def test_without_one_of_them_they_differ(sampled, tiny, what):
    assert equal_share(sampled, LEFT_OUT[what](tiny, sampled)) < 1.0


def test_each_row_of_the_contract_is_left_out_and_told():
    assert list(OF_ROW) == rows_of_the_page("## What has to agree") and set(OF_ROW.values()) <= set(LEFT_OUT)


@pytest.mark.parametrize("trainer", [HuggingFace, Megatron])
def test_only_one_tree_on_both_sides_gives_the_same_bits(tiny, trainer):
    samples = sample(tiny, TREE)
    with pinned(CONTRACT):
        shares = []
        for tree in (TREE, None, Tree(leaves=8)):
            model = trainer(tiny, "bf16", ORDER, tree)
            log_probs = [model.log_probs([one], [one.request.temperature])[0] for one in samples]
            shares.append(equal_share(samples, log_probs))
    assert shares[0] == 1.0 and max(shares[1:]) < 1.0
