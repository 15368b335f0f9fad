"""Where a response's tokens lie: whole on one rank, or zigzag over context-parallel ranks.

With `cp` ranks a sequence is cut into `2 * cp` equal chunks and rank r owns chunks r and `2 * cp - 1 - r`, so that
causal attention costs every rank the same. The log-prob of token t is read at position t - 1: a response occupies
positions [prompt - 1, total - 1), and a rank may own none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Shaped
from torch import Tensor

from mis_plugins.packing.ragged import Ragged, Ranks, Responses, to_device

Span = tuple[int, int]  # [start, stop) within a response


@dataclass(frozen=True)
class Layout:
    """The response tokens that this rank holds.

    response_lengths: how many response tokens each sequence has over all ranks.
    spans: this rank's pieces of each response, in order; None where every response is whole.
    """

    response_lengths: Sequence[int]
    spans: Sequence[Sequence[Span]] | None = None

    @cached_property
    def local_lengths(self) -> list[int]:
        if self.spans is None:
            return list(self.response_lengths)
        return [sum(stop - start for start, stop in pieces) for pieces in self.spans]

    def pieces(self, sequence: int) -> Sequence[Span]:
        """Pieces of one response that lie on this rank."""
        return [(0, self.response_lengths[sequence])] if self.spans is None else self.spans[sequence]

    def cut(self, responses: Sequence[Shaped[Tensor, "_"]]) -> list[Shaped[Tensor, "_"]]:
        """The tokens of whole responses that lie on this rank."""
        return [
            torch.cat([response[start:stop] for start, stop in self.pieces(i)]) for i, response in enumerate(responses)
        ]

    def place(self, loss_mask: Shaped[Tensor, " R"], ranks: Ranks) -> Ragged:
        """The host's full-response masks, concatenated, placed on this rank."""
        local = self.local_lengths
        ends = [0, *accumulate(local)]
        parts = [ends, local]
        if self.spans is not None:
            parts += [[0, *accumulate(self.response_lengths)], *self._shifts(self.spans)]
        table = to_device([number for part in parts for number in part], loss_mask.device)
        cu_seqlens, counts, *others = table.split([len(part) for part in parts])
        if not others:
            return Ragged(cu_seqlens, loss_mask.bool(), ranks, counts=counts)
        starts, lengths, shifts = others
        index = torch.arange(ends[-1], device=loss_mask.device)
        index = index + shifts.repeat_interleave(lengths, output_size=ends[-1])
        whole = Responses(starts, loss_mask.bool(), index)
        return Ragged(cu_seqlens, whole.loss_mask.index_select(0, index), ranks, whole, counts)

    def _shifts(self, spans: Sequence[Sequence[Span]]) -> tuple[list[int], list[int]]:
        """Length and shift of each piece: local position plus shift is the position among all responses' tokens."""
        lengths, shifts, local, full = [], [], 0, 0
        for response, pieces in zip(self.response_lengths, spans, strict=True):
            for start, stop in pieces:
                lengths.append(stop - start)
                shifts.append(full + start - local)
                local += stop - start
            full += response
        return lengths, shifts


def whole(response_lengths: Sequence[int]) -> Layout:
    """Layout of responses that lie whole on this rank."""
    return Layout(response_lengths)


def zigzag(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp_size: int,
    cp_rank: int,
    padded_lengths: Sequence[int] | None = None,
) -> Layout:
    """Layout of responses that lie zigzag over `cp_size` ranks.

    A sequence is cut at its own length (`thd`), or at its number in `padded_lengths`, padded before the cut (`bshd`).
    """
    padded = total_lengths if padded_lengths is None else padded_lengths
    rows = zip(total_lengths, response_lengths, padded, strict=True)
    return Layout(response_lengths, [_zigzag_spans(*row, cp_size, cp_rank) for row in rows])


def _zigzag_spans(total: int, response: int, padded: int, cp_size: int, cp_rank: int) -> list[Span]:
    chunk = -(-padded // (2 * cp_size))
    first = total - response - 1  # the position whose logits give the first response token
    spans = []
    for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
        start = min(max(number * chunk - first, 0), response)
        spans.append((start, min(max((number + 1) * chunk - first, start), response)))
    return spans
