"""Segments: runs of ones in the loss mask, found on whole responses and on a rank's part of them."""

import torch
from batches import Batch, batches
from hypothesis import given
from hypothesis import strategies as st

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
