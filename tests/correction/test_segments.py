"""Segments: runs of ones in the loss mask, found on whole responses and on a rank's part of them."""

import math

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
