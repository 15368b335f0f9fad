"""Sums over tokens, sequences and token ids for the detectors of causes, kept in one pass."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mis_plugins.correction.pipeline import Correction
from mis_plugins.metrics.tokens import Tokens
from mis_plugins.packing.ragged import Ragged
from mis_plugins.report.record import Batch, Record

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
        """Moments with the finite numbers of `x` added."""
        x = x[x.isfinite()].double()
        return Moments(
            self.count + x.numel(), self.total + float(x.sum()), self.squares + float(x.square().sum())
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        return max(self.squares / self.count - self.mean**2, 0.0)

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN of fewer than two numbers."""
        return math.sqrt(self.variance / (self.count - 1)) if self.count > 1 else math.nan

    @classmethod
    def sum(cls, parts: Iterable[Moments]) -> Moments:
        parts = list(parts)
        return cls(*(sum(getattr(one, name) for one in parts) for name in ("count", "total", "squares")))


@dataclass
class Evidence:
    """Sums over a whole run that detectors read; the step metrics stand beside them.

    moments: of each number of `of_sequences`.
    sizes, correlations: of each sequence the mean |log r|, and the correlation of log pi_old and log mu.
    by_id: of each token id the count, and the sums of log r, log mu, (log r)^2, (log mu)^2 and their product.
    """

    moments: defaultdict[str, Moments] = field(default_factory=lambda: defaultdict(Moments))
    sure_yet_unlikely: int = 0
    broken_advantages: int = 0
    sizes: list[Float[Tensor, " N"]] = field(default_factory=list)
    correlations: list[Float[Tensor, " N"]] = field(default_factory=list)
    by_id: Float[Tensor, "6 V"] | None = None

    def add(self, batch: Batch, correction: Correction, tokens: Tokens) -> None:
        numbers, correlation = of_sequences(batch.ragged, tokens, _ended(batch))
        for name, values in numbers.items():
            self.moments[name] = self.moments[name].plus(values)
        sure = tokens.usable & (batch.behavior == 0) & (batch.proximal < UNLIKELY)
        self.sure_yet_unlikely += int(sure.sum())
        self.broken_advantages += sum(map(_broken_advantages, batch.records))
        self.sizes.append(numbers["size"].float())
        self.correlations.append(correlation.float())
        ids = batch.whole_numbers("tokens")
        if ids is not None:
            self._add_ids(ids, tokens)

    def _add_ids(self, ids: Int[Tensor, " T"], tokens: Tokens) -> None:
        known = tokens.usable & (ids >= 0) & (ids < LARGEST_ID)
        index, r, m = ids[known], tokens.log_ratio[known], tokens.behavior[known]
        if not index.numel():
            return
        size = int(index.max()) + 1
        rows = (torch.ones_like(r), r, m, r * r, m * m, r * m)
        added = torch.stack([torch.bincount(index, row, size) for row in rows])
        self.by_id = added if self.by_id is None else _added(self.by_id, added)


def _broken_advantages(record: Record) -> int:
    """Number of valid tokens whose advantage is NaN or infinite."""
    return 0 if record.advantages is None else int((~record.advantages.isfinite() & record.loss_mask).sum())


def _added(first: Tensor, second: Tensor) -> Tensor:
    longer, shorter = (first, second) if first.shape[1] >= second.shape[1] else (second, first)
    total = longer.clone()
    total[:, : shorter.shape[1]] += shorter
    return total


def _ended(batch: Batch) -> Bool[Tensor, " N"]:
    """Responses that ended by themselves, as far as that is known."""
    return torch.tensor([record.truncated is not True for record in batch.records])


def of_sequences(
    ragged: Ragged, tokens: Tokens, ended: Bool[Tensor, " N"]
) -> tuple[dict[str, Float[Tensor, " L"]], Float[Tensor, " L"]]:
    """Numbers of the sequences that have at least `LONG_ENOUGH` usable tokens.

    Returns:
        numbers: mean |log r| of the first tokens (`beginning`), of the last token (`end`, NaN of a response that ran
            into a limit), of the others (`middle`) and of all (`size`); the mean log r of the first tokens
            (`beginning_signed`); and what `beginning` and `end` are above `middle`.
        correlation: of log pi_old and log mu over the sequence's tokens.
    """
    usable, size = tokens.usable, tokens.abs_log_ratio
    place = usable.cumsum(0)
    starts = torch.cat([place.new_zeros(1), place])[ragged.cu_seqlens]
    place = place - ragged.to_tokens(starts[:-1])
    last = usable & (place == ragged.to_tokens(starts.diff()))
    first = usable & (place <= BEGINNING)
    at_ends = [
        torch.where(where, x, 0) for where, x in ((first, size), (first, tokens.log_ratio), (last, size))
    ]
    x, y = tokens.behavior, tokens.proximal
    names: tuple[str, ...] = ("usable", "size", "begins", "signed", "end", "x", "y", "xy")
    sums: dict[str, Tensor] = dict(zip(names, (usable, size, *at_ends, x, y, x * y), strict=True))
    rows = torch.stack([*ragged.totals(sums, {"xx": x, "yy": y}).values()])
    long = rows[0] >= LONG_ENOUGH
    n, total, begins, signed, end, sx, sy, xy, xx, yy = rows[:, long].unbind()
    covariance = xy - sx * sy / n
    spread = ((xx - sx * sx / n) * (yy - sy * sy / n)).clamp(min=0).sqrt()
    found = {
        "beginning": begins / BEGINNING,
        "beginning_signed": signed / BEGINNING,
        "end": torch.where(ended[long], end, torch.nan),
        "middle": (total - begins - end) / (n - BEGINNING - 1),
        "size": total / n,
    }
    excess = {f"{name}_excess": found[name] - found["middle"] for name in ("beginning", "end")}
    return found | excess, torch.where(spread > 1e-9, covariance / spread, 1.0)
