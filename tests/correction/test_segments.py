"""Segments: runs of ones in the loss mask, found on whole responses and on a rank's part of them."""

import math

import oracle
import pytest
import torch
from batches import Batch, batches, ratio_batch
from drive import run
from hypothesis import given
from hypothesis import strategies as st
from tolerances import weight_rtol

from mis_plugins.correction.segments import Segments
from mis_plugins.packing.layout import whole, zigzag
from mis_plugins.packing.ragged import Ranks


@given(batches(), st.sampled_from([1, 2, 4]))
def test_numbers_and_owners(batch: Batch, cp: int):
    """On every rank, the same number for the same run, and its sequence."""
    runs, owners = {}, []
    for i, sample in enumerate(batch.samples):
        for t in sample.valid:
            first = sample.run(t)[0]
            if (i, first) not in runs:
                runs[i, first] = len(owners)
                owners.append(i)
    lengths = batch.response_lengths
    mask = torch.cat(batch.loss_masks)
    for rank in range(cp):
        layout = whole(lengths) if cp == 1 else zigzag(batch.total_lengths, lengths, cp, rank)
        ragged = layout.place(mask, Ranks())
        segments = Segments.of(ragged)
        found = segments.ragged.to_tokens(torch.arange(segments.ragged.size))
        _, owned = batch.shard(cp, rank, None) if cp > 1 else (None, [list(range(n)) for n in lengths])
        expected = [runs[i, s.run(t)[0]] if s.mask[t] else None
                    for (i, s), own in zip(enumerate(batch.samples), owned, strict=True) for t in own]  # fmt: skip
        assert [n if e is not None else None for n, e in zip(found.tolist(), expected, strict=True)] == expected
        assert segments.owner[: len(owners)].tolist() == owners


def test_a_turn_is_weighed_alone():
    """Two turns of one sequence, a tool's answer between them: the products 0.5 * 1.2 and 3."""
    batch = ratio_batch([[0.5, 1.2, 9.0, 3.0]], [[1, 1, 0, 1]])
    product = run(batch, {"weight": {"level": "segment", "upper": 10.0}}).weights[0]
    geometric = run(batch, {"weight": {"level": "segment_geometric", "upper": 10.0}}).weights[0]
    torch.testing.assert_close(product, torch.tensor([0.6, 0.6, 0.0, 3.0]), rtol=weight_rtol(3.0), atol=0)
    mean = math.sqrt(0.6)
    torch.testing.assert_close(geometric, torch.tensor([mean, mean, 0.0, 3.0]), rtol=weight_rtol(3.0), atol=0)


def test_a_turn_is_dropped_alone():
    batch = ratio_batch([[0.5, 1.2, 9.0, 3.0]], [[1, 1, 0, 1]])
    rule = {"over": "mean", "unit": "segment", "upper": 2.0}
    assert run(batch, {"weight": None, "reject": [rule]}).masks[0].tolist() == [1, 1, 0, 0]
    assert run(batch, {"weight": None, "reject": [rule | {"unit": "sequence"}]}).masks[0].tolist() == [1, 1, 0, 1]


def test_neighbouring_sequences_are_not_one_turn():
    """The last token of one sequence and the first of the next, both valid."""
    weights = run(ratio_batch([[2.0], [3.0]]), {"weight": {"level": "segment", "upper": 10.0}}).weights
    torch.testing.assert_close(torch.cat(weights), torch.tensor([2.0, 3.0]), rtol=weight_rtol(2.0), atol=0)


def test_a_nan_is_dropped_alone_by_rules_over_tokens_only():
    """With `aggregate: kept` too a rule over turns drops the turn, whose statistic is not known."""
    batch = ratio_batch([[0.5, 1.2, 9.0, 3.0]], [[1, 1, 0, 1]])
    batch.behavior[0][1] = math.nan
    turns, tokens = {"over": "mean", "unit": "segment", "upper": 5.0}, {"over": "token", "upper": 5.0}
    config = {"weight": {"level": "geometric", "upper": 10.0}, "aggregate": "kept"}
    assert run(batch, config | {"reject": [turns]}).masks[0].tolist() == [0, 0, 0, 1]
    assert run(batch, config | {"reject": [turns, tokens]}).masks[0].tolist() == [1, 0, 0, 1]
    of_turns = {"weight": {"level": "segment", "upper": 10.0}, "aggregate": "kept", "reject": [tokens]}
    weights = run(batch, of_turns).metrics["mis_tis_weight_after_bound"][0]
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.0, 0.0, 3.0]), rtol=weight_rtol(3.0), atol=0)


@pytest.mark.parametrize("over", ["valid", "kept"])
def test_normalization_counts_each_turn_once(over: str):
    """A turn of three tokens counts as much as a turn of one."""
    batch = ratio_batch([[1.2, 1.1, 1.3, 9.0, 0.5]], [[1, 1, 1, 0, 1]])
    config = {"weight": {"level": "segment_geometric", "bound": "truncate", "upper": 10.0, "normalize": {"over": over}},
              "reject": [{"over": "token", "upper": 5.0}]}  # fmt: skip
    factor = run(batch, config).metrics["mis_batch_norm_factor"][0][0].item()
    assert factor == pytest.approx((math.exp(math.fsum(map(math.log, (1.2, 1.1, 1.3))) / 3) + 0.5) / 2,
                                   rel=weight_rtol(2.0))  # fmt: skip
    assert oracle.correct(batch.samples, config).factor == pytest.approx(factor, rel=weight_rtol(2.0))


def test_the_mean_of_what_is_kept_leaves_out_turns_that_any_rule_drops():
    """The first by a rule over turns, the second by a rule over tokens that leaves none of it."""
    batch = ratio_batch([[0.5, 0.6, 9.0, 1.7, 9.0, 1.1, 1.3]], [[1, 1, 0, 1, 0, 1, 1]])
    rules = [{"over": "token", "upper": 1.5}, {"over": "mean", "unit": "segment", "lower": 0.9}]
    weight = {"level": "segment_geometric", "bound": "truncate", "upper": 10.0, "normalize": {"over": "kept"}}
    config = {"weight": weight, "reject": rules}
    factor = run(batch, config).metrics["mis_batch_norm_factor"][0][0].item()
    assert factor == pytest.approx(math.sqrt(1.1 * 1.3), rel=weight_rtol(2.0))
    assert oracle.correct(batch.samples, config).factor == pytest.approx(factor, rel=weight_rtol(2.0))
