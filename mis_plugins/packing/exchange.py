"""Numbers of tokens between two layouts over context-parallel ranks.

A host with `--allgather-cp` cuts its stream of packed sequences, and with it the logits, into one piece a rank. Its
loss holds the tokens zigzag all the same (`layout.py`). An exchange takes numbers from one layout to the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor

from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.layout import Layout


def contiguous(total_lengths: Sequence[int], response_lengths: Sequence[int], rows: int, rank: int) -> Layout:
    """Layout of the response tokens that the rows [rank x rows, (rank + 1) x rows) of the packed stream score."""
    spans = []
    for end, response in zip(accumulate(total_lengths), response_lengths, strict=True):
        first = end - response - 1  # the row that scores the first response token
        start, stop = (min(max(number * rows - first, 0), response) for number in (rank, rank + 1))
        spans.append([(start, stop)])
    return Layout(response_lengths, spans)


def gathered(
    layout: Layout, rows: Sequence[Shaped[Tensor, "_"]], group: dist.ProcessGroup | None
) -> Sequence[Shaped[Tensor, "_"]]:
    """Whole responses from each rank's tokens, the inverse of `Layout.cut`. Collective over the group."""
    if group is None:
        return rows
    full = [row.new_zeros(length) for row, length in zip(rows, layout.response_lengths, strict=True)]
    for i, row in enumerate(rows):
        pieces = layout.pieces(i)
        parts = row.split([stop - start for start, stop in pieces])
        for (start, stop), part in zip(pieces, parts, strict=True):
            full[i][start:stop] = part
    joined = torch.cat(full)
    all_reduce(joined, group)
    return joined.split(list(layout.response_lengths))


@dataclass(frozen=True)
class Exchange:
    """The way of a number between the rank that holds its token in the loss and the one whose logits score the token.

    held, scored: the place, among the R response tokens of all sequences, of each token of this rank in either layout.
    size: R.
    """

    held: Int[Tensor, " T"]
    scored: Int[Tensor, " S"]
    size: int
    group: dist.ProcessGroup

    @classmethod
    def between(cls, held: Layout, scored: Layout, group: dist.ProcessGroup, device: torch.device) -> "Exchange":
        """The exchange of two layouts of the same responses."""
        lengths = list(held.response_lengths)
        places = torch.arange(sum(lengths), device=device).split(lengths)
        return cls(torch.cat(held.cut(places)), torch.cat(scored.cut(places)), sum(lengths), group)

    def to_scored(self, numbers: Shaped[Tensor, "n T"]) -> Shaped[Tensor, "n S"]:
        """Each number on the rank whose logits score its token. Collective; the gradient takes the way back."""
        return _Exchanged.apply(numbers, self.held, self.scored, self)

    def to_held(self, numbers: Shaped[Tensor, "n S"]) -> Shaped[Tensor, "n T"]:
        """Each number on the rank that holds its token in the loss. Collective; the gradient takes the way back."""
        return _Exchanged.apply(numbers, self.scored, self.held, self)


class _Exchanged(torch.autograd.Function):
    """Numbers of tokens in another layout: each token lies on one rank, so that a sum over ranks joins them."""

    @staticmethod
    def forward(ctx, numbers: Tensor, origin: Tensor, goal: Tensor, exchange: Exchange) -> Tensor:
        ctx.ways = goal, origin, exchange
        every = numbers.new_zeros(numbers.shape[0], exchange.size)
        every.index_copy_(1, origin, numbers)
        all_reduce(every, exchange.group)
        return every.index_select(1, goal)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchanged.apply(gradients[0], *ctx.ways), None, None, None
