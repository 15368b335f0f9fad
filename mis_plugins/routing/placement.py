"""The sequence and position of each row that a router sees, and whether the loss reads the row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mis_plugins.packing.layout import Layout
from mis_plugins.packing.ragged import to_device

POSITIONS = (0, 64, 256, 1024, 4096, 16384)  # where each bucket of positions starts
BUCKETS = len(POSITIONS)


@dataclass(frozen=True)
class Grid:
    """How the tokens of a micro-batch lie over context-parallel ranks, and over the ranks of a sequence-parallel group.

    contiguous: context-parallel ranks hold pieces of the whole stream (--allgather-cp), and not zigzag.
    """

    cp_size: int = 1
    cp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0
    contiguous: bool = False


@dataclass(frozen=True)
class Placement:
    """One micro-batch on this rank, as rows of `n` tokens before sequence parallelism cuts them.

    sequences: the number of sequences, padding at the end among them.
    counted: the loss reads the next token, so that this row's routing decides a log-prob.
    """

    grid: Grid
    sequences: int
    sequence: Int[Tensor, " n"]
    position: Int[Tensor, " n"]
    bucket: Int[Tensor, " n"]
    counted: Bool[Tensor, " n"]

    def here(self, x: Shaped[Tensor, " n"]) -> Shaped[Tensor, " T"]:
        """The part of the rows that this rank of the sequence-parallel group routes."""
        return x.chunk(self.grid.sp_size)[self.grid.sp_rank] if self.grid.sp_size > 1 else x


def placement(loss_mask: Shaped[Tensor, "b s"], cu_seqlens: Int[Tensor, " bounds"] | None, grid: Grid) -> Placement:
    """Place the rows of a micro-batch, without waiting for the device.

    Args:
        loss_mask: marks routed tokens whose next token is in the loss: one position before that token.
        cu_seqlens: where packed sequences start over all context-parallel ranks; None where each has its own row.
    """
    if cu_seqlens is None:
        sequences, sequence, position = _in_rows(loss_mask, grid)
    else:
        sequences, sequence, position = _in_a_stream(loss_mask.shape[1], cu_seqlens.long(), grid)
    bucket = torch.bucketize(position, to_device(list(POSITIONS[1:]), position.device), right=True)
    counted = loss_mask.transpose(0, 1).reshape(-1) != 0
    return Placement(grid, sequences, sequence, position, bucket, counted)


Placed = tuple[int, Int[Tensor, " n"], Int[Tensor, " n"]]  # sequences; of each row its sequence and its position


def _in_rows(loss_mask: Shaped[Tensor, "b s"], grid: Grid) -> Placed:
    """Place sequences that have a row of the micro-batch each; the router sees position after position."""
    batch, length = loss_mask.shape
    rows = torch.arange(length, device=loss_mask.device)
    position = _unfolded(rows, torch.full_like(rows, length), grid).repeat_interleave(batch)
    return batch, torch.arange(batch, device=rows.device).repeat(length), position


def _in_a_stream(length: int, cu_seqlens: Int[Tensor, " bounds"], grid: Grid) -> Placed:
    """Place the part of packed sequences that this context-parallel rank holds."""
    starts = cu_seqlens if grid.contiguous else cu_seqlens // grid.cp_size
    first = length * grid.cp_rank if grid.contiguous else 0
    rows = torch.arange(first, first + length, device=cu_seqlens.device)
    sequences = starts.numel() - 1
    sequence = torch.searchsorted(starts[1:], rows, right=True).clamp(max=sequences - 1)
    within = rows - starts[sequence]
    position = within if grid.contiguous else _unfolded(within, starts.diff()[sequence], grid)
    return sequences, sequence, position


def _unfolded(within: Int[Tensor, " n"], local: Int[Tensor, " n"], grid: Grid) -> Int[Tensor, " n"]:
    """The position in the whole sequence of a place within the two chunks that this context-parallel rank owns."""
    if grid.cp_size == 1:
        return within
    chunk, cp, rank = local // 2, grid.cp_size, grid.cp_rank
    return torch.where(within < chunk, within + rank * chunk, within + (2 * cp - 2 - rank) * chunk)


def response_rows(
    layout: Layout,
    total_lengths: Sequence[int],
    grid: Grid,
    device: torch.device,
    padded_lengths: Sequence[int] | None = None,
) -> Int[Tensor, " T"]:
    """The row of a micro-batch that predicted each local response token; `padded_lengths` is of `bshd` alone."""
    starts, counts, base = [], [], 0
    for sequence, (total, response) in enumerate(zip(total_lengths, layout.response_lengths, strict=True)):
        padded = total if padded_lengths is None else padded_lengths[sequence]
        chunk = padded if grid.cp_size == 1 else -(-padded // (2 * grid.cp_size))
        numbers = (0,) if grid.cp_size == 1 else (grid.cp_rank, 2 * grid.cp_size - 1 - grid.cp_rank)
        for place, (number, (start, stop)) in enumerate(zip(numbers, layout.pieces(sequence), strict=True)):
            counts.append(stop - start)
            starts.append(base + start + total - response - 1 + (place - number) * chunk)
        base += chunk * len(numbers)
    ends = list(accumulate(counts))
    shifts = [start - (end - count) for start, end, count in zip(starts, ends, counts, strict=True)]
    lengths, offsets = to_device([*counts, *shifts], device).split(len(counts))
    return torch.arange(ends[-1], device=device) + offsets.repeat_interleave(lengths, output_size=ends[-1])


def first_of(where: Bool[Tensor, " n"], placed: Placement) -> Float[Tensor, " S"]:
    """The first position of each sequence that is marked; inf where none is."""
    position = torch.where(where, placed.position.double(), torch.inf)
    first = position.new_full((placed.sequences,), torch.inf)
    return first.scatter_reduce_(0, placed.sequence, position, "amin")
