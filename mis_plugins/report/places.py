"""Where the mismatch lies: numbers of tokens by position, length, probability, turn, advantage, age and route."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.terms.divergence import k3
from mis_plugins.metrics.tokens import Tokens
from mis_plugins.report.evidence import mass
from mis_plugins.report.record import Batch

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


def _capped(name: str) -> Bucket:
    def bucket(batch: Batch) -> Tensor | None:
        numbers = batch.whole_numbers(name)
        return None if numbers is None else numbers.clamp(max=LAST)

    return bucket


def _sign(batch: Batch) -> Tensor | None:
    if batch.advantages is None:
        return None
    known = batch.advantages.isfinite()
    return torch.where(known, torch.where(known, batch.advantages, 0).sign().long() + 1, -1)


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
    "turn": Place(_capped("turns"), COUNTS, "turn of the token"),
    "advantage": Place(_sign, ["negative", "zero", "positive"], "sign of the token's advantage"),
    "age": Place(_capped("ages"), COUNTS, "trainer version less version that wrote the token"),
    "route": Place(_capped("route_differs"), ["same", "differs"], "experts of trainer and engine"),
}
ROWS: dict[str, Callable[[Tokens], Float[Tensor, " T"]]] = {
    "tokens": lambda t: t.usable.double(),
    "kl_k1": lambda t: -t.log_ratio,
    "kl_k3": lambda t: k3(t.log_ratio),
    "log_prob_diff_abs_mean": lambda t: t.log_ratio.abs(),
    "k3_squared": lambda t: k3(t.log_ratio).square(),
    "mass": mass,
}


@dataclass
class Tables:
    """Sums of `ROWS` in every bucket of every place."""

    sums: dict[str, Float[Tensor, "rows buckets"]] = field(default_factory=dict)

    def add(self, batch: Batch, tokens: Tokens) -> None:
        rows = [row(tokens) for row in ROWS.values()]
        for name, place in PLACES.items():
            bucket, size = place.bucket(batch), len(place.labels)
            if bucket is None:
                continue
            index = torch.where(
                bucket < 0, size, bucket
            )  # one bucket more, at the end, takes what is unknown
            sums = torch.stack([torch.bincount(index, row, size + 1)[:size] for row in rows])
            self.sums[name] = self.sums.get(name, 0) + sums

    def rows(self) -> dict[str, list[dict[str, float | str]]]:
        """Rows of each table: bucket, tokens, and means over the bucket's usable tokens. Empty buckets are left out."""
        return {name: list(_rows(PLACES[name].labels, sums)) for name, sums in self.sums.items()}


def _rows(labels: Sequence[str], sums: Tensor) -> Iterator[dict[str, float | str]]:
    for label, (count, *totals) in zip(labels, sums.T.tolist(), strict=True):
        if count:
            means = {name: total / count for name, total in zip(list(ROWS)[1:], totals, strict=True)}
            yield {"bucket": label, "tokens": count, **means}
