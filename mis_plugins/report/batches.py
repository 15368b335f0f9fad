"""Records packed end to end into batches of one step, as the training path packs its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mis_plugins.packing.ragged import Ragged
from mis_plugins.report.record import Record

TOKENS = 131_072  # of a batch: rows of it stay in the cache of a core
UNKNOWN = -1


@dataclass(frozen=True)
class Batch:
    """N responses of one step, packed into T tokens. A column that no response has is None."""

    step: int
    records: tuple[Record, ...]

    @cached_property
    def ragged(self) -> Ragged:
        mask = torch.cat([record.loss_mask for record in self.records])
        return Ragged(torch.tensor([0, *accumulate(self.lengths)]), mask)

    @cached_property
    def lengths(self) -> list[int]:
        return [record.size for record in self.records]

    @cached_property
    def proximal(self) -> Float[Tensor, " T"]:
        return torch.cat([record.proximal_log_probs for record in self.records])

    @cached_property
    def behavior(self) -> Float[Tensor, " T"]:
        return torch.cat([record.behavior_log_probs for record in self.records])

    @cached_property
    def advantages(self) -> Float[Tensor, " T"] | None:
        """Advantages; NaN of a response without."""
        return self._column(lambda record: record.advantages, torch.nan, torch.float32)

    @cached_property
    def broken_advantages(self) -> int:
        """Number of valid tokens of responses with advantages whose own advantage is NaN or infinite."""
        given = self._column(lambda record: record.advantages, 0.0, torch.float32)
        return 0 if given is None else int((~given.isfinite() & self.ragged.loss_mask).sum())

    @cached_property
    def tokens(self) -> Int[Tensor, " T"] | None:
        return self._column(lambda record: record.tokens, UNKNOWN, torch.int64)

    @cached_property
    def ages(self) -> Int[Tensor, " T"] | None:
        return self._column(lambda record: record.ages, UNKNOWN, torch.int64)

    @cached_property
    def turns(self) -> Int[Tensor, " T"] | None:
        return self._column(lambda record: record.turns, UNKNOWN, torch.int64)

    @cached_property
    def route_differs(self) -> Int[Tensor, " T"] | None:
        """1 where the routes differ, 0 where they agree, -1 where that is unknown."""
        return self._column(lambda record: record.route_differs, UNKNOWN, torch.int64)

    @cached_property
    def positions(self) -> Int[Tensor, " T"]:
        """Place of each token in its response, from 0."""
        starts = self.ragged.cu_seqlens[:-1]
        return torch.arange(self.ragged.loss_mask.numel()) - self.ragged.to_tokens(starts)

    def _column(
        self, of: Callable[[Record], Tensor | None], missing: float, kind: torch.dtype
    ) -> Tensor | None:
        values = [of(record) for record in self.records]
        if all(value is None for value in values):
            return None
        filled = [
            torch.full((record.size,), missing, dtype=kind) if value is None else value.to(kind)
            for value, record in zip(values, self.records, strict=True)
        ]
        return torch.cat(filled)


def batches(records: Iterable[Record], tokens: int = TOKENS) -> Iterator[Batch]:
    """Batches of at most `tokens` tokens, or of one longer response; responses of one step that follow one another."""
    held: list[Record] = []
    size = 0
    for record in records:
        if held and (record.step != held[0].step or size + record.size > tokens):
            yield Batch(held[0].step, tuple(held))
            held, size = [], 0
        held.append(record)
        size += record.size
    if held:
        yield Batch(held[0].step, tuple(held))
