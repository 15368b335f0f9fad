"""Where the mismatch lies: by position, length, probability, turn, advantage, age and route, and where it is worst."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.config.terms.divergence import k3
from mis_plugins.metrics.tokens import Tokens
from mis_plugins.report.evidence import as_normal, mass
from mis_plugins.report.record import Batch, Record

Bucket = Callable[[Batch], Tensor | None]

DOUBLING = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)
LAST = 15  # turns and ages from here on share a bucket


def doubling(x: Tensor) -> Tensor:
    """Bucket of each number: 0, 1, 2 to 3, 4 to 7 and so on."""
    return torch.bucketize(x, torch.tensor(DOUBLING), right=True)


def _length(batch: Batch) -> Tensor:
    return batch.ragged.to_tokens(doubling(batch.ragged.cu_seqlens.diff()))


def _probability(batch: Batch) -> Tensor:
    edges = torch.tensor(PROBABILITIES).log()
    return torch.bucketize(batch.behavior.nan_to_num(0.0), edges, right=True)


def _capped(batch: Batch, name: str) -> Tensor | None:
    numbers = batch.whole_numbers(name)
    return None if numbers is None else numbers.clamp(max=LAST)


def _sign(batch: Batch) -> Tensor | None:
    if batch.advantages is None:
        return None
    finite = batch.advantages.isfinite()
    return torch.where(finite, torch.where(finite, batch.advantages, 0).sign().long() + 1, -1)


SPANS = [
    "0",
    *(f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in pairwise(DOUBLING)),
    f"{DOUBLING[-1]}+",
]
COUNTS = [*map(str, range(LAST)), f"{LAST}+"]


@dataclass(frozen=True)
class Place:
    """One way to sort tokens into buckets.

    bucket: the bucket of each token, below 0 where it is unknown; None where no response tells.
    labels: name of each bucket.
    what: what the buckets are, in words.
    """

    bucket: Bucket
    labels: Sequence[str]
    what: str


SHARES = ["below 1%", "1-10%", "10-50%", "50-90%", "90-99%", "above 99%"]
PLACES: dict[str, Place] = {
    "position": Place(lambda batch: doubling(batch.positions), SPANS, "place of the token in its response"),
    "length": Place(_length, SPANS, "length of the response in tokens"),
    "probability": Place(_probability, SHARES, "probability of the token under the rollout engine"),
    "turn": Place(partial(_capped, name="turns"), COUNTS, "turn of the token"),
    "advantage": Place(_sign, ["negative", "zero", "positive"], "sign of the token's advantage"),
    "age": Place(partial(_capped, name="ages"), COUNTS, "trainer version less version that wrote the token"),
    "route": Place(partial(_capped, name="route_differs"), ["same", "differs"], "experts of trainer and engine"),
}
ROWS: dict[str, Callable[[Tokens], Float[Tensor, " T"]]] = {
    "tokens": lambda t: t.usable.double(),
    "kl_k1": lambda t: -t.log_ratio,
    "kl_k3": lambda t: k3(t.log_ratio),
    "log_prob_diff_abs_mean": lambda t: t.log_ratio.abs(),
    "mass": mass,
    "mass_squared": lambda t: mass(t).square(),
}


# The places whose buckets are compared, and the number that is compared.
COMPARED = {"probability": "kl_k1", "age": "log_prob_diff_abs_mean", "route": "log_prob_diff_abs_mean"}


@dataclass
class Tables:
    """Sums of `ROWS` in every bucket of every place.

    products: of each place of `COMPARED` the sum over responses of v v', where v has of one response the number of
        tokens in each bucket, and their sums of the number that is compared.
    """

    sums: dict[str, Float[Tensor, "rows buckets"]] = field(default_factory=dict)
    products: dict[str, Float[Tensor, "two_buckets two_buckets"]] = field(default_factory=dict)

    def add(self, batch: Batch, tokens: Tokens) -> None:
        rows = {name: row(tokens) for name, row in ROWS.items()}
        for name, place in PLACES.items():
            bucket, size = place.bucket(batch), len(place.labels)
            if bucket is None:
                continue
            index = torch.where(bucket < 0, size, bucket)  # one bucket more, at the end, takes what is unknown
            sums = torch.stack([torch.bincount(index, row, size + 1)[:size] for row in rows.values()])
            self.sums[name] = self.sums.get(name, 0) + sums
            if name in COMPARED:
                compared = (rows["tokens"], rows[COMPARED[name]])
                self.products[name] = self.products.get(name, 0) + _products(batch, index, size, compared)

    def means(self, name: str, part: Tensor) -> dict[str, float]:
        """The number of tokens in some buckets, and the means of `ROWS` over them; 0 of none."""
        count, *totals = (self.sums[name] * part).sum(1).tolist()
        return {"tokens": count} | {row: x / max(count, 1) for row, x in zip([*ROWS][1:], totals, strict=True)}

    def errors(self, name: str, part: Bool[Tensor, " B"], others: Bool[Tensor, " B"] | None = None) -> float:
        """By how many standard errors the log of a mean over buckets is above that over others, or a mean above 0.

        Tokens of one response may err alike. So the error is that of sums over responses, by the delta method, and
        counts by Student's t of as many responses as would hold the tokens evenly.
        """
        compared, products = self.sums[name][[0, list(ROWS).index(COMPARED[name])]], self.products[name]
        above, freedom, moved = 0.0, math.inf, products.new_zeros(len(products))
        for sign, side in zip((1, -1), [part] if others is None else [part, others], strict=False):
            weight = torch.cat([side, torch.zeros_like(side)]).double()
            count, total = (compared * side).sum(1).tolist()
            mean = total / count
            scale = 1.0 if others is None else max(mean, 1e-30)
            above += sign * (mean if others is None else math.log(scale))
            freedom = min(freedom, count**2 / float(weight @ products @ weight) - 1)  # responses, if all were as long
            moved += sign / (count * scale) * (weight.roll(len(side)) - mean * weight)
        error = math.sqrt(max(float(moved @ products @ moved), 0) * (freedom + 1) / max(freedom, 1))
        return as_normal(above / max(error, 1e-150), freedom)

    def rows(self) -> dict[str, list[dict[str, float | str]]]:
        """Rows of each table: bucket, tokens, and means over the bucket's usable tokens. Empty buckets are left out."""
        return {
            name: [
                {"bucket": label, **means}
                for label, bucket in zip(PLACES[name].labels, torch.eye(sums.shape[1]), strict=True)
                if (means := self.means(name, bucket))["tokens"]
            ]
            for name, sums in self.sums.items()
        }


def _products(batch: Batch, index: Int[Tensor, " T"], size: int, rows: Iterable[Tensor]) -> Float[Tensor, "K K"]:
    """What the responses of a batch add to `Tables.products`."""
    owner = batch.ragged.to_tokens(torch.arange(batch.ragged.size))
    cell, held = owner * (size + 1) + index, batch.ragged.size * (size + 1)
    each = torch.cat([torch.bincount(cell, row, held).view(-1, size + 1)[:, :size] for row in rows], 1)
    return each.T @ each


TOKENS, SEQUENCES = 50, 12
AROUND = 100  # tokens of a sequence that a page shows on either side of its worst token


@dataclass
class Largest:
    """The items with the largest values above 0, at most `most` of them, the largest first."""

    most: int
    held: list[tuple[float, Any]] = field(default_factory=list)

    def add(self, values: Float[Tensor, " N"], item: Callable[[int], Any]) -> None:
        """Add values; `item` is called with the place of each value that may be kept."""
        largest = values.topk(min(self.most, values.numel()))
        least = self.held[-1][0] if len(self.held) == self.most else 0.0
        pairs = zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
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
    values = {name: column[position].item() for name, column in columns.items() if column is not None}
    text = {} if record.text is None else {"text": record.text[position]}
    place = {"step": record.step, "sample": record.sample, "position": position}
    numbers = {"behavior_log_prob": behavior, "proximal_log_prob": proximal, "log_ratio": proximal - behavior}
    return place | numbers | values | text


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
