"""Sums over tokens, sequences and token ids for the detectors of causes, kept in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.correction.pipeline import Correction
from mis_plugins.metrics.rows import Tokens
from mis_plugins.packing.ragged import Ragged
from mis_plugins.report.batches import Batch

BEGINNING = 4  # valid tokens that count as the beginning of a response
LONG_ENOUGH = 16  # valid tokens of a sequence whose ends are compared with its middle
LARGEST_ID = 1_000_000
UNLIKELY = -1.0  # log-prob of the trainer where the engine reports a probability of exactly 1


@dataclass(frozen=True)
class Moments:
    """Number, mean and standard error of a number over sequences."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, x: Float[Tensor, " N"]) -> Moments:
        x = x.double()
        return Moments(
            self.count + x.numel(), self.total + float(x.sum()), self.squares + float(x.square().sum())
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN of fewer than two numbers."""
        if self.count < 2:
            return math.nan
        variance = max(self.squares / self.count - self.mean**2, 0.0)
        return math.sqrt(variance / (self.count - 1))


@dataclass(frozen=True)
class OfSequences:
    """Numbers of each sequence that has at least `LONG_ENOUGH` usable tokens.

    beginning, end, middle: mean |log r| of the first tokens, of the last token, and of the others.
    beginning_signed: mean log r of the first tokens.
    size: mean |log r|.
    correlation: Pearson correlation over the sequence's tokens of log pi_old and log mu.
    """

    beginning: Float[Tensor, " N"]
    beginning_signed: Float[Tensor, " N"]
    end: Float[Tensor, " N"]
    middle: Float[Tensor, " N"]
    size: Float[Tensor, " N"]
    correlation: Float[Tensor, " N"]


@dataclass
class Evidence:
    """Sums over a whole run that detectors read; the step metrics stand beside them.

    by_id: of each token id the count, and the sums of log r, log mu, (log r)^2, (log mu)^2 and their product.
    """

    beginning: Moments = Moments()
    beginning_signed: Moments = Moments()
    end: Moments = Moments()
    middle: Moments = Moments()
    beginning_excess: Moments = Moments()
    end_excess: Moments = Moments()
    sure_yet_unlikely: int = 0
    broken_advantages: int = 0
    sizes: list[Float[Tensor, " N"]] = field(default_factory=list)
    correlations: list[Float[Tensor, " N"]] = field(default_factory=list)
    by_id: Float[Tensor, "6 V"] | None = None

    def add(self, batch: Batch, correction: Correction, tokens: Tokens) -> None:
        found = of_sequences(batch.ragged, tokens, _ended(batch))
        for name in ("beginning", "beginning_signed", "end", "middle"):
            value = getattr(found, name)
            setattr(self, name, getattr(self, name).plus(value[value.isfinite()]))
        self.beginning_excess = self.beginning_excess.plus(found.beginning - found.middle)
        finished = found.end.isfinite()
        self.end_excess = self.end_excess.plus((found.end - found.middle)[finished])
        sure = tokens.usable & (batch.behavior == 0) & (batch.proximal < UNLIKELY)
        self.sure_yet_unlikely += int(sure.sum())
        self.broken_advantages += batch.broken_advantages
        self.sizes.append(found.size.float())
        self.correlations.append(found.correlation.float())
        if batch.tokens is not None:
            self._add_ids(batch.tokens, tokens)

    def _add_ids(self, ids: Int[Tensor, " T"], tokens: Tokens) -> None:
        known = tokens.usable & (ids >= 0) & (ids < LARGEST_ID)
        index, r, m = ids[known], tokens.log_ratio[known], tokens.behavior[known]
        if not index.numel():
            return
        size = int(index.max()) + 1
        rows = (torch.ones_like(r), r, m, r * r, m * m, r * m)
        added = torch.stack([torch.bincount(index, row, size) for row in rows])
        self.by_id = added if self.by_id is None else _added(self.by_id, added)


def _added(first: Tensor, second: Tensor) -> Tensor:
    longer, shorter = (first, second) if first.shape[1] >= second.shape[1] else (second, first)
    total = longer.clone()
    total[:, : shorter.shape[1]] += shorter
    return total


def _ended(batch: Batch) -> Bool[Tensor, " N"]:
    """Responses that ended by themselves, as far as that is known."""
    return torch.tensor([record.truncated is not True for record in batch.records])


def of_sequences(ragged: Ragged, tokens: Tokens, ended: Bool[Tensor, " N"]) -> OfSequences:
    """Numbers of the sequences that are long enough. `end` is NaN of a response that ran into a limit."""
    usable, size = tokens.usable, tokens.abs_log_ratio
    place = usable.cumsum(0)
    starts = torch.cat([place.new_zeros(1), place])[ragged.cu_seqlens]
    place = place - ragged.to_tokens(starts[:-1])
    last = usable & (place == ragged.to_tokens(starts.diff()))
    first = usable & (place <= BEGINNING)
    x, y = tokens.behavior, tokens.proximal
    at_ends = [
        torch.where(first, size, 0),
        torch.where(first, tokens.log_ratio, 0),
        torch.where(last, size, 0),
    ]
    names: tuple[str, ...] = ("usable", "size", "begins", "signed", "end", "x", "y", "xy")
    sums: dict[str, Tensor] = dict(zip(names, (usable, size, *at_ends, x, y, x * y), strict=True))
    rows = torch.stack([*ragged.totals(sums, {"xx": x, "yy": y}).values()])
    long = rows[0] >= LONG_ENOUGH
    n, total, begins, signed, end, sx, sy, xy, xx, yy = rows[:, long].unbind()
    middle = (total - begins - end) / (n - BEGINNING - 1)
    covariance = xy - sx * sy / n
    spread = ((xx - sx * sx / n) * (yy - sy * sy / n)).clamp(min=0).sqrt()
    return OfSequences(
        begins / BEGINNING,
        signed / BEGINNING,
        torch.where(ended[long], end, torch.nan),
        middle,
        total / n,
        torch.where(spread > 1e-9, covariance / spread, 1.0),
    )
