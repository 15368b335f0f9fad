"""Ragged batches over ranks: sequences packed end to end, each perhaps spread over context-parallel ranks.

Shape letters in every room: `T` tokens on this rank, `N` sequences of the micro-batch, `R` response tokens of all
sequences, `K` stacked statistics. A tensor `[T]` is local to a rank; a tensor `[N]` is equal on all context-parallel
ranks. No code can add a token twice: only `totals` turns `[T]` into `[N]`, and only `over_batch` reduces `[N]`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mis_plugins.packing.collectives import RANK_LOST, all_reduce, discard_step

# Rows of more tokens are summed one by one on a CPU, whose kernel hands out new memory page by page: 7 ms for 8 rows.
LONG_ON_CPU = 2**17


@dataclass(frozen=True)
class Ranks:
    """Process groups of the ranks that hold other parts of this batch. `Ranks()` is one process.

    cp: ranks that hold other tokens of the same sequences.
    dp: ranks that hold other sequences of the same step.
    tp: ranks that hold the same tokens and other parts of the model. No sum goes over these ranks.
    """

    cp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Responses:
    """The whole responses of which a rank holds a part.

    cu_seqlens: where each response starts among all R response tokens, and R at the end.
    index: position of each local token among the R response tokens.
    """

    cu_seqlens: Int[Tensor, " bounds"]  # N + 1 of them
    loss_mask: Bool[Tensor, " R"]
    index: Int[Tensor, " T"]


@dataclass(frozen=True)
class Ragged:
    """N sequences packed into T local tokens, of which the loss mask marks the valid ones.

    cu_seqlens: where each sequence starts, and T at the end, on the tokens' device.
    loss_mask: the host's mask, true where a token enters the loss.
    responses: None where the local tokens are the whole responses.
    counts: number of local tokens of each sequence; None derives it from `cu_seqlens`.
    """

    cu_seqlens: Int[Tensor, " bounds"]  # N + 1 of them
    loss_mask: Bool[Tensor, " T"]
    ranks: Ranks = Ranks()
    responses: Responses | None = None
    counts: Int[Tensor, " N"] | None = None

    @property
    def size(self) -> int:
        """The number of sequences, N."""
        return self.cu_seqlens.numel() - 1

    @cached_property
    def lengths(self) -> Int[Tensor, " N"]:
        """The number of local tokens of each sequence."""
        return self.cu_seqlens.diff() if self.counts is None else self.counts

    @cached_property
    def turns(self) -> Int[Tensor, " T"]:
        """Number, from 1, of the run of ones that began last in each token's own sequence; 0 before the first run.

        Runs are counted in the whole responses, of which a context-parallel rank may hold a part.
        """
        whole = self.responses
        starts, mask = (self if whole is None else whole).cu_seqlens, (whole or self).loss_mask
        begun = run_of_token(starts, mask)
        of_token = begun if whole is None else begun.index_select(0, whole.index)
        begun = F.pad(begun, (1, 0))  # before each token, and at the end
        return of_token - self.to_tokens(begun.index_select(0, starts[:-1]))

    def totals(
        self,
        sums: Mapping[str, Shaped[Tensor, " T"]],
        squares: Mapping[str, Float[Tensor, " T"]] = MappingProxyType({}),
        minima: Mapping[str, Float[Tensor, " T"]] = MappingProxyType({}),
        maxima: Mapping[str, Float[Tensor, " T"]] = MappingProxyType({}),
    ) -> dict[str, Float[Tensor, " N"]]:
        """Totals of each sequence over all its tokens, on whatever rank, by the names of their rows.

        The caller fills tokens that shall not enter with 0, or +-inf for extremes: by torch.where, as a product keeps
        NaN. Everything costs one collective, and none without context parallelism. Sums are float64 from the first
        addition and depend on their own sequence alone. A sequence without a token has sum 0, minimum inf and maximum
        -inf.
        """
        added = self._added([*sums.values(), *squares.values()], len(sums))
        smallest = [self._extreme(row, torch.inf, "amin") for row in minima.values()]
        largest = [self._extreme(row, -torch.inf, "amax") for row in maxima.values()]
        extremes = smallest + largest
        rows = torch.cat([added, *extremes]) if extremes else added
        names = [*sums, *squares, *minima, *maxima]
        if self.ranks.cp is None:
            return dict(zip(names, rows.split_with_sizes([self.size] * len(names)), strict=True))
        combined = _combine(rows.view(-1, self.size), len(smallest), len(largest), self.ranks.cp)
        return dict(zip(names, combined.unbind(), strict=True))

    def sums(self, *rows: Shaped[Tensor, " T"]) -> tuple[Float[Tensor, " N"], ...]:
        """The sums of rows over each sequence, as `totals` makes them, in the order of the rows."""
        return tuple(self.totals({str(i): row for i, row in enumerate(rows)}).values())

    def over_batch(self, per_sequence: Float[Tensor, "K N"]) -> Float[Tensor, " K"]:
        """Sum over the sequences of this micro-batch and of its data-parallel peers: one collective, if any."""
        total = per_sequence.sum(-1)
        return total if self.ranks.dp is None else _added(total, self.ranks.dp)

    def to_tokens(self, per_sequence: Shaped[Tensor, " N"]) -> Shaped[Tensor, " T"]:
        """Give each local token the value of its sequence."""
        return per_sequence.index_select(0, self._sequence_of_token)

    def full_mask(self, tokens: Bool[Tensor, " T"] | None, sequences: Bool[Tensor, " N"] | None) -> Bool[Tensor, " R"]:
        """Mask of the tokens that are kept in whole responses. A mask of tokens costs one collective.

        None for `tokens` keeps all local tokens, masked ones included; None for `sequences` keeps all sequences.
        """
        responses = self.responses
        assert responses is not None
        keep = torch.ones_like(responses.loss_mask) if tokens is None else self._gather(tokens, responses)
        if sequences is None:
            return keep
        return keep & sequences.repeat_interleave(responses.cu_seqlens.diff(), output_size=keep.numel())

    def _gather(self, tokens: Bool[Tensor, " T"], responses: Responses) -> Bool[Tensor, " R"]:
        """Mask of whole responses from the local masks: a token lies on one rank, so a sum over ranks joins them."""
        full = torch.zeros_like(responses.loss_mask, dtype=torch.uint8)
        full.index_copy_(0, responses.index, tokens.byte())
        dist.all_reduce(full, group=self.ranks.cp)
        return full.bool()

    @cached_property
    def _sequence_of_token(self) -> Int[Tensor, " T"]:
        return torch.repeat_interleave(self.lengths, output_size=self.loss_mask.numel())

    def _added(self, rows: list[Shaped[Tensor, " T"]], first_square: int) -> Float[Tensor, " KN"]:
        """Sums of each row by sequence, row after row; rows from `first_square` on are squared first."""
        tokens, device = self.loss_mask.numel(), self.loss_mask.device
        if len(rows) > 1 and device.type == "cpu" and tokens >= LONG_ON_CPU:
            return torch.cat([self._added([as_bytes(row)], int(i < first_square)) for i, row in enumerate(rows)])
        wide = torch.empty(len(rows) * tokens, dtype=torch.float64, device=device)
        if not rows:
            return wide
        torch.cat(rows, out=wide)
        if first_square < len(rows):
            squared = wide[first_square * tokens :]
            squared.mul_(squared)
        # `unsafe` skips a check of the lengths that would wait for the device.
        return torch.segment_reduce(wide, "sum", lengths=self.lengths.repeat(len(rows)), unsafe=True)

    def _extreme(self, row: Float[Tensor, " T"], start: float, reduce: Literal["amin", "amax"]) -> Float[Tensor, " N"]:
        # Extremes are scattered, in any order: segment_reduce takes three times as long on a CPU.
        return row.new_full((self.size,), start).scatter_reduce_(0, self._sequence_of_token, row, reduce)


def run_of_token(starts: Int[Tensor, " bounds"], mask: Bool[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Number, from 1, of the run of ones that began last at or before each token; 0 before the first run."""
    previous = F.pad(mask, (1, 0)).index_fill_(0, starts, False)
    return (mask > previous[:-1]).cumsum(0)  # on bools a > b is a & ~b, in one kernel


def as_bytes(x: Tensor) -> Tensor:
    """View bools as int8, which a CPU widens four times faster; other tensors pass unchanged."""
    return x.view(torch.int8) if x.dtype == torch.bool else x


def _added(total: Float[Tensor, " K"], group: dist.ProcessGroup) -> Float[Tensor, " K"]:
    """Sum over data-parallel ranks; this rank's own total where a rank of torchft's group died.

    Miles repeats the step in which a rank died. In another kind of group, whose host would apply the step,
    a dead rank raises RANK_LOST.
    """
    added = total.clone()
    try:
        all_reduce(added, group)
    except RANK_LOST:
        if not hasattr(group, "errored"):
            raise
        discard_step(group)
        return total
    return added


def _combine(totals: Float[Tensor, "K N"], minima: int, maxima: int, group: dist.ProcessGroup) -> Float[Tensor, "K N"]:
    """Combine the totals of all ranks: sums add, extremes compete, in rank order, so that all bits agree."""
    gathered = totals.new_empty(dist.get_world_size(group), *totals.shape)
    dist.all_gather_into_tensor(gathered.view(-1), totals.reshape(-1), group=group)
    added, smallest, largest = gathered.split([len(totals) - minima - maxima, minima, maxima], 1)
    if not minima + maxima:
        return added.sum(0)
    return torch.cat([added.sum(0), smallest.amin(0), largest.amax(0)])


def to_device(numbers: list[int], device: torch.device) -> Int[Tensor, " _"]:
    """Copy host integers to the device without waiting for the device."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
