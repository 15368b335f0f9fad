"""The totals of a step: one pass over each population of a micro-batch, and sums that add over micro-batches and ranks.

The split of a step into micro-batches, data-parallel and context-parallel ranks does not change what its partials merge
into: sums agree to float64 rounding, maxima and histograms exactly.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.metrics import sketch
from mis_plugins.metrics.quantity import Quantity, Record, Step, needed
from mis_plugins.packing.collectives import all_reduce

# Sums of exponentials that overflow a float64: one sum a window of the exponent, each scaled by its window's start.
WINDOW, WINDOWS = 64.0, 128
POWERS = (1, 2)  # powers of a whole sequence's ratio that are added up


@dataclass(frozen=True)
class Partials:
    """Sums, maxima and histograms of one micro-batch, or of many merged; equal in kind for all of one config.

    names: names of the rows of `sums`, `maxima` and `histograms`.
    records: what the quantities are, with the metrics that are made of one quantity each.
    counts: sums that the host knows.
    added: tensors that add: `sums`; `histograms`, one row a sketch; `products`, the sums over sequences of `POWERS` of
        their ratios by window of the exponent; and what a caller keeps beside them.
    largest: tensors of which the larger one counts: `maxima`, -inf where there was none, and what a caller keeps.
    """

    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    added: Mapping[str, Tensor] = field(default_factory=dict)
    largest: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def beside(cls, parts: "Iterable[Partials]") -> "Partials":
        """The totals of several populations of one micro-batch together."""
        every = list(parts)
        joined = {kind: sum(names, ()) for kind, names in _by_key(part.names for part in every)}
        records = tuple(record for part in every for record in part.records)
        counts = {name: count for part in every for name, count in part.counts.items()}
        tensors = ([part.added for part in every], [part.largest for part in every])
        added, largest = (
            {kind: rows[0] if len(rows) == 1 else torch.cat(rows) for kind, rows in _by_key(held)} for held in tensors
        )
        return cls(joined, records, counts, added, largest)

    def merge(self, other: "Partials") -> "Partials":
        """Add the sums and histograms of two, and take the larger of their maxima."""
        assert self.names == other.names
        return replace(
            self,
            counts={name: x + other.counts[name] for name, x in self.counts.items()},
            added={name: x + other.added[name] for name, x in self.added.items()},
            largest={name: torch.maximum(x, other.largest[name]) for name, x in self.largest.items()},
        )

    def over_ranks(self, groups: Iterable[dist.ProcessGroup]) -> "Partials":
        """Merge over all ranks: one sum and one maximum over each group. A float64 holds counts exactly."""
        every, sums = list(groups), self.added["sums"].double()
        counted = torch.cat([sums, sums.new_tensor([*self.counts.values()])])
        return replace(
            self,
            names={**self.names, "sums": (*self.names["sums"], *self.counts)},
            counts={},
            added=_over_ranks({**self.added, "sums": counted}, every, dist.ReduceOp.SUM),
            largest=_over_ranks(self.largest, every, dist.ReduceOp.MAX),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> "Partials":
        """Apply a function to every tensor, such as a copy to the host."""
        held = self.added, self.largest
        added, largest = ({name: function(x) for name, x in tensors.items()} for tensors in held)
        return replace(self, added=added, largest=largest)

    def uncounted(self) -> "Partials":
        """Totals with 0 for all that adds: of the ranks that hold one batch of sequences, one rank counts it."""
        added = {name: torch.zeros_like(x) for name, x in self.added.items()}
        return replace(self, counts=dict.fromkeys(self.counts, 0.0), added=added)

    @property
    def named_sums(self) -> dict[str, float]:
        """Sums by name, as numbers: they should be on the host by now."""
        return dict(zip(self.names["sums"], self.added["sums"].tolist(), strict=True)) | dict(self.counts)

    def step(self) -> Step:
        """The totals as numbers: they should be on the host by now."""
        maxima, histograms = self.names.get("maxima", ()), self.names.get("histograms", ())
        products = self.added["products"].tolist() if "products" in self.added else ()
        return Step(
            self.named_sums,
            dict(zip(maxima, self.largest["maxima"].tolist(), strict=True)) if maxima else {},
            dict(zip(histograms, self.added["histograms"].unbind(), strict=True)) if histograms else {},
            {power: _log_sum(row) for power, row in zip(POWERS, products, strict=True)} if products else {},
        )


def _by_key(held: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, list[Any]]]:
    """All values of one key together."""
    by_key: dict[str, list[Any]] = {}
    for key, value in chain.from_iterable(mapping.items() for mapping in held):
        by_key.setdefault(key, []).append(value)
    return by_key.items()


def _over_ranks(
    tensors: Mapping[str, Tensor], groups: Iterable[dist.ProcessGroup], operation: dist.ReduceOp.RedOpType
) -> dict[str, Tensor]:
    if not tensors:
        return {}
    packed = torch.cat([x.flatten() for x in tensors.values()])
    for group in groups:
        all_reduce(packed, group, operation)
    parts = packed.split([x.numel() for x in tensors.values()])
    return {name: part.view_as(x) for (name, x), part in zip(tensors.items(), parts, strict=True)}


@dataclass(frozen=True)
class Places:
    """Parts of a population: their names, and how much of each member belongs to each; "" names the whole.

    A name beyond the last column has no member.
    """

    names: tuple[str, ...]
    columns: Float[Tensor, "M P"]


def reduced(
    quantities: Iterable[Quantity],
    where: Float[Tensor, " M"] | None = None,
    places: Places | None = None,
    edges: Float[Tensor, " E"] | None = None,
    marked: Bool[Tensor, " M"] | None = None,
) -> Iterator[Partials]:
    """Sums, extremes and sketches of the quantities of one population. Nothing waits for the device.

    Args:
        quantities: finite where they are added up, at members that do not enter too.
        where: 1 at members that enter, else 0; None where all do, or where extremes too are taken over each place.
        edges: of the buckets of sketches; None where no quantity has percentiles.
        marked: members of whom marks are counted as they are, and not widened to float64; None widens them. What
            `places` count cannot be such a mark.
    """
    every = [(q, needed(q.also, *(r.needs for r in q.metrics.values()))) for q in quantities]
    yield Partials(records=tuple((q.name, q.metrics, q.over) for q, _ in every))
    marks = [] if marked is None else [q for q, _ in every if _is_mark(q)]
    if marked is not None and marks:
        rows = torch.stack([q.values for q in marks]).bitwise_and_(marked)
        yield Partials({"sums": tuple(q.name for q in marks)}, added={"sums": rows.sum(-1, dtype=torch.int32)})
    summed = [q for q, needs in every if "sum" in needs and not (marks and _is_mark(q))]
    if summed:
        yield _sums(summed, [q for q, needs in every if "squares" in needs], where, places)
    ended = [q for q, needs in every if "ends" in needs]
    if ended:
        at = places if where is None else None
        names = tuple(
            f"{place}{q.name}_{side}" for side in ("max", "min") for q in ended for place in (at.names if at else ("",))
        )
        columns = where if at is None else at.columns
        yield Partials({"maxima": names}, largest={"maxima": _extremes(ended, columns)})
    sketched = [q for q, needs in every if "sketch" in needs]
    if sketched:
        assert edges is not None and where is not None
        counts = sketch.histograms(torch.stack([q.values for q in sketched]), where, edges)
        yield Partials({"histograms": tuple(q.name for q in sketched)}, added={"histograms": counts})


def _is_mark(q: Quantity) -> bool:
    """Whether a quantity marks members, and no metric asks for more than how many."""
    taken = (r.needs + r.at for r in q.metrics.values())
    return q.values.dtype == torch.bool and {q.also, *taken} <= {"", "sum"}


def _sums(
    summed: list[Quantity], squared: list[Quantity], where: Float[Tensor, " M"] | None, places: Places | None
) -> Partials:
    """Sums of quantities, and of the squares of some of them, over all members and over each place."""
    names = [q.name for q in summed] + [f"{q.name}_squared" for q in squared]
    # These rows stand in the stack twice, and their copies are squared in place: one product adds up all of them.
    rows = torch.stack([q.values for q in (*summed, *squared)])
    if squared:
        rows = rows.double()
        rows[len(summed) :].square_()
    columns = where if places is None else places.columns
    if columns is None:
        return Partials({"sums": tuple(names)}, added={"sums": rows.sum(-1, dtype=torch.float64)})
    sums = rows.to(columns.dtype) @ columns
    if places is not None:
        names = [f"{place}{name}" for name in names for place in places.names]
        missing = len(places.names) - sums.shape[1]
        sums = (F.pad(sums, (0, missing)) if missing else sums).flatten()
    return Partials({"sums": tuple(names)}, added={"sums": sums})


def _extremes(ended: list[Quantity], columns: Float[Tensor, "M *P"] | None) -> Float[Tensor, " E"]:
    """Largest value of each quantity, then of each negated one, over each column; minus infinity without a token."""
    both = torch.stack([q.values for q in ended] * 2).double()
    both[len(ended) :].neg_()
    if columns is not None:  # members that do not enter are put at log 0
        both = both.unsqueeze(1) + columns.T.log() if columns.dim() == 2 else both.add_(columns.log())
    if not both.shape[-1]:
        return both.new_full((both.shape[:-1].numel(),), -torch.inf)
    return both.amax(-1).flatten()


def powers(log_ratio: Float[Tensor, " N"], where: Bool[Tensor, " N"]) -> Partials:
    """Sums of powers of each sequence's ratio, by window of the exponent."""
    exponents = torch.stack([log_ratio, 2 * log_ratio])
    window = torch.div(exponents, WINDOW, rounding_mode="floor").clamp_(-WINDOWS // 2, WINDOWS // 2 - 1)
    scaled = exponents.sub_(window, alpha=WINDOW).exp_().mul_(where)
    sums = exponents.new_zeros(len(POWERS), WINDOWS)
    return Partials(added={"products": sums.scatter_add_(1, (window + WINDOWS // 2).long(), scaled)})


def _log_sum(windows: list[float]) -> float:
    """Logarithm of the sum over all windows; NaN where every window is 0."""
    logs = [math.log(x) + WINDOW * (i - WINDOWS // 2) for i, x in enumerate(windows) if x > 0]
    if not logs:
        return math.nan
    highest = max(logs)
    return highest + math.log(math.fsum(math.exp(x - highest) for x in logs))
