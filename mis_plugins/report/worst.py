"""The tokens and sequences in which both policies differ most, with what is known of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mis_plugins.metrics.rows import Tokens
from mis_plugins.report.batches import Batch
from mis_plugins.report.record import Record

TOKENS, SEQUENCES = 50, 12
AROUND = 100  # tokens of a sequence that a page shows on either side of its worst token


@dataclass
class Worst:
    """The worst tokens by |log r|, and the worst sequences by mean |log r|, as heaps of bounded size."""

    tokens: list[tuple[float, int, Mapping[str, Any]]] = field(default_factory=list)
    sequences: list[tuple[float, int, Record]] = field(default_factory=list)
    numbers: itertools.count = field(default_factory=itertools.count)

    def add(self, batch: Batch, tokens: Tokens) -> None:
        size = tokens.abs_log_ratio
        found = size.topk(min(TOKENS, size.numel()))
        for value, place in zip(found.values.tolist(), found.indices.tolist(), strict=True):
            if value > 0 and (len(self.tokens) < TOKENS or value > self.tokens[0][0]):
                _push(self.tokens, (value, next(self.numbers), _token(batch, place)), TOKENS)
        self._add_sequences(batch, tokens)

    def _add_sequences(self, batch: Batch, tokens: Tokens) -> None:
        total, usable = batch.ragged.sums(tokens.abs_log_ratio, tokens.usable)
        means = total / usable.clamp(min=1)
        found = means.topk(min(SEQUENCES, means.numel()))
        for value, place in zip(found.values.tolist(), found.indices.tolist(), strict=True):
            if value > 0 and (len(self.sequences) < SEQUENCES or value > self.sequences[0][0]):
                held = batch.records[place].copied()
                _push(self.sequences, (value, next(self.numbers), held), SEQUENCES)

    def worst_tokens(self) -> list[Mapping[str, Any]]:
        return [told for _, _, told in sorted(self.tokens, key=lambda item: -item[0])]

    def worst_sequences(self) -> list[dict[str, Any]]:
        """The worst sequences, each with its numbers and the tokens around its worst token."""
        return [
            _sequence(value, record) for value, _, record in sorted(self.sequences, key=lambda item: -item[0])
        ]


def _push(heap: list, item: tuple, size: int) -> None:
    (heapq.heappush if len(heap) < size else heapq.heappushpop)(heap, item)


def _token(batch: Batch, place: int) -> dict[str, Any]:
    owner = int(torch.searchsorted(batch.ragged.cu_seqlens, place, right=True)) - 1
    position = place - int(batch.ragged.cu_seqlens[owner])
    return token(batch.records[owner], position)


def token(record: Record, position: int) -> dict[str, Any]:
    """What is known of one token, as numbers and texts of Python."""
    behavior, proximal = (float(x[position]) for x in (record.behavior_log_probs, record.proximal_log_probs))
    known = {
        "token": None if record.tokens is None else int(record.tokens[position]),
        "text": None if record.text is None else record.text[position],
        "advantage": None if record.advantages is None else float(record.advantages[position]),
        "version": None if record.versions is None else int(record.versions[position]),
    }
    told = {"step": record.step, "sample": record.sample, "position": position}
    told |= {"behavior_log_prob": behavior, "proximal_log_prob": proximal, "log_ratio": proximal - behavior}
    return told | {name: value for name, value in known.items() if value is not None}


def _sequence(value: float, record: Record) -> dict[str, Any]:
    difference = record.proximal_log_probs - record.behavior_log_probs
    difference = torch.where(difference.isfinite(), difference, 0)
    usable = torch.where(record.loss_mask, difference.abs(), 0)
    middle = int(usable.argmax())
    shown = range(max(middle - AROUND, 0), min(middle + AROUND, record.size))
    told = {
        "step": record.step,
        "sample": record.sample,
        "length": record.size,
        "log_prob_diff_abs_mean": value,
    }
    told |= {"sequence_log_ratio": float(torch.where(record.loss_mask, difference, 0).sum())}
    given = {"reward": record.reward, "prompt": record.prompt, "response": record.response}
    told |= {name: value for name, value in given.items() if value is not None}
    return told | {"first": shown.start, "valid": record.loss_mask[shown.start : shown.stop].tolist(),
                   "tokens": [token(record, position) for position in shown]}  # fmt: skip
