"""The tokens and sequences in which both policies differ most, with what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """The items with the largest values above 0, at most `most` of them, the largest first."""

    most: int
    held: list[tuple[float, Any]] = field(default_factory=list)

    def add(self, values: Float[Tensor, " N"], item: Callable[[int], Any]) -> None:
        """Add values; `item` is called with the places of those that may be kept."""
        found = values.topk(min(self.most, values.numel()))
        least = self.held[-1][0] if len(self.held) == self.most else 0.0
        pairs = zip(found.values.tolist(), found.indices.tolist(), strict=True)
        added = [(value, item(place)) for value, place in pairs if value > least]
        self.held = sorted(self.held + added, key=lambda pair: -pair[0])[: self.most]


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
        return [token for _, token in self.tokens.held]

    def worst_sequences(self) -> list[dict[str, Any]]:
        """The worst sequences, each with its numbers and the tokens around its worst token."""
        return [_sequence(value, record) for value, record in self.sequences.held]


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
