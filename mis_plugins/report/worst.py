"""The tokens and sequences in which both policies differ most, with what is known of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.metrics.tokens import Tokens
from mis_plugins.report.record import Batch, Record

TOKENS, SEQUENCES = 50, 12
AROUND = 100  # tokens of a sequence that a page shows on either side of its worst token


@dataclass
class Largest:
    """The items with the largest values, at most `most` of them, as a heap."""

    most: int
    heap: list[tuple[float, int, Any]] = field(default_factory=list)
    numbers: itertools.count = field(default_factory=itertools.count)

    def add(self, values: Float[Tensor, " N"], item: Callable[[int], Any]) -> None:
        """Add values above 0; `item` is called with the places of those that are kept."""
        found = values.topk(min(self.most, values.numel()))
        for value, place in zip(found.values.tolist(), found.indices.tolist(), strict=True):
            full = len(self.heap) == self.most
            if value > 0 and (not full or value > self.heap[0][0]):
                push = heapq.heappushpop if full else heapq.heappush
                push(self.heap, (value, next(self.numbers), item(place)))

    def __iter__(self) -> Iterator[tuple[float, Any]]:
        """Values and items, the largest first."""
        return ((value, item) for value, _, item in sorted(self.heap, key=lambda held: -held[0]))


@dataclass
class Worst:
    """The worst tokens by |log r|, and the worst sequences by mean |log r|."""

    tokens: Largest = field(default_factory=lambda: Largest(TOKENS))
    sequences: Largest = field(default_factory=lambda: Largest(SEQUENCES))

    def add(self, batch: Batch, tokens: Tokens) -> None:
        size = tokens.log_ratio.abs()
        total, usable = batch.ragged.sums(size, tokens.usable)
        self.tokens.add(size, lambda place: _token(batch, place))
        self.sequences.add(total / usable.clamp(min=1), lambda place: batch.records[place].copied())

    def worst_tokens(self) -> list[Mapping[str, Any]]:
        return [token for _, token in self.tokens]

    def worst_sequences(self) -> list[dict[str, Any]]:
        """The worst sequences, each with its numbers and the tokens around its worst token."""
        return [_sequence(value, record) for value, record in self.sequences]


def _token(batch: Batch, place: int) -> dict[str, Any]:
    owner = int(torch.searchsorted(batch.ragged.cu_seqlens, place, right=True)) - 1
    return token(batch.records[owner], place - int(batch.ragged.cu_seqlens[owner]))


def token(record: Record, position: int) -> dict[str, Any]:
    """What is known of one token, as numbers and texts of Python."""
    behavior, proximal = (float(x[position]) for x in (record.behavior_log_probs, record.proximal_log_probs))
    columns = {"token": record.tokens, "advantage": record.advantages, "version": record.versions}
    known = {name: column[position].item() for name, column in columns.items() if column is not None}
    text = {} if record.text is None else {"text": record.text[position]}
    place = {"step": record.step, "sample": record.sample, "position": position}
    numbers = {"behavior_log_prob": behavior, "proximal_log_prob": proximal, "log_ratio": proximal - behavior}
    return place | numbers | known | text


def _sequence(value: float, record: Record) -> dict[str, Any]:
    difference = record.proximal_log_probs - record.behavior_log_probs
    difference = torch.where(record.loss_mask & difference.isfinite(), difference, 0)
    middle = int(difference.abs().argmax())
    shown = range(max(middle - AROUND, 0), min(middle + AROUND, record.size))
    given = {"reward": record.reward, "prompt": record.prompt, "response": record.response}
    return {
        "step": record.step,
        "sample": record.sample,
        "length": record.size,
        "log_prob_diff_abs_mean": value,
        "sequence_log_ratio": float(difference.sum()),
        **{name: value for name, value in given.items() if value is not None},
        "first": shown.start,
        "valid": record.loss_mask[shown.start : shown.stop].tolist(),
        "tokens": [token(record, position) for position in shown],
    }
