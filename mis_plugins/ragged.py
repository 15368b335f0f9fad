"""Ragged batches over ranks: sequences packed end to end, each perhaps spread over context-parallel ranks.

Shape letters, here and elsewhere: `T` tokens on this rank, `N` sequences of the micro-batch, `R` response tokens
of all sequences, `K` stacked statistics. Every `[T]` is local to a rank; every `[N]` is the same on all
context-parallel ranks. Summing a token twice therefore cannot be written: only `over_sequence` turns `[T]` into
`[N]`, and only `over_batch` reduces `[N]` further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Who else holds part of this batch. `Ranks()` is one process.

    cp: ranks that hold other tokens of the same sequences.
    dp: ranks that hold other sequences of the same step.
    """

    cp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Ragged:
    """N sequences packed into T local tokens, with what counts among them.

    cu_seqlens: where each sequence starts, and T at the end, on the tokens' device.
    loss_mask: the host's: true where a token enters the loss.
    """

    cu_seqlens: Int[Tensor, "N+1"]
    loss_mask: Bool[Tensor, " T"]
    ranks: Ranks = Ranks()

    def over_sequence(
        self,
        sums: Mapping[str, Shaped[Tensor, " T"]],
        maxima: Mapping[str, Float[Tensor, " T"]] | None = None,
    ) -> dict[str, Float[Tensor, " N"]]:
        """Total (or largest) value of each sequence over all its tokens in loss_mask, on whatever rank they are.

        One collective for all names together, none without context parallelism. Sums are float64 from the first
        addition, in an order that depends on the sequence alone; a sequence without a token has sum 0, maximum -inf.
        """
        maxima = maxima or {}
        rows = [self._segments(torch.where(self.loss_mask, x, 0).double(), "sum") for x in sums.values()]
        rows += [
            self._segments(torch.where(self.loss_mask, x, -torch.inf), "max").double()
            for x in maxima.values()
        ]
        packed = torch.stack(rows)
        if self.ranks.cp is not None:
            packed = _combine(_all_gather(packed, self.ranks.cp), len(sums))
        return dict(zip([*sums, *maxima], packed.unbind(), strict=True))

    def over_batch(self, per_sequence: Float[Tensor, "K N"]) -> Float[Tensor, " K"]:
        """Sum over the sequences of this micro-batch and of its data-parallel peers: one collective, if any."""
        total = per_sequence.sum(-1)
        if self.ranks.dp is not None:
            dist.all_reduce(total, group=self.ranks.dp)
        return total

    def to_tokens(self, per_sequence: Shaped[Tensor, " N"]) -> Shaped[Tensor, " T"]:
        """Each sequence's value at each of its local tokens."""
        return per_sequence.index_select(0, self._sequence_of_token)

    @cached_property
    def _sequence_of_token(self) -> Int[Tensor, " T"]:
        count = self.cu_seqlens.numel() - 1
        index = torch.arange(count, dtype=torch.int32, device=self.cu_seqlens.device)
        return index.repeat_interleave(self.cu_seqlens.diff(), output_size=self.loss_mask.numel())

    def _segments(self, x: Float[Tensor, " T"], op: str) -> Float[Tensor, " N"]:
        # unsafe skips a check of the offsets that would wait for the device.
        return torch.segment_reduce(x, op, offsets=self.cu_seqlens, unsafe=True)


def _all_gather(x: Float[Tensor, "K N"], group: dist.ProcessGroup) -> Float[Tensor, "cp K N"]:
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather_into_tensor(parts, x, group=group)
    return parts


def _combine(parts: Float[Tensor, "cp K N"], sums: int) -> Float[Tensor, "K N"]:
    """Sums add and maxima compete, in rank order: the same bits on every rank."""
    return torch.cat([parts[:, :sums].sum(0), parts[:, sums:].amax(0)])


def to_device(numbers: list[int], device: torch.device) -> Int[Tensor, " _"]:
    """Host integers on the device without waiting for it."""
    tensor = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
