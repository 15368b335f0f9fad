"""What the watch says at the step hook: reduced over all ranks, read once, as metrics and as faults."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.metrics.routing import routing_metrics
from mis_plugins.packing.collectives import RANK_LOST, all_reduce
from mis_plugins.packing.transfer import Arrival, to_host
from mis_plugins.routing.fault import of_sample, of_table
from mis_plugins.routing.placement import POSITIONS
from mis_plugins.routing.table import CLASSES, KINDS, SPLIT, Group, empty_table, gather
from mis_plugins.routing.watch import Watch

logger = logging.getLogger("mis_plugins")


@dataclass(frozen=True)
class Groups:
    """Groups of ranks that hold other parts of a step; None for one rank.

    sp: the tensor-parallel group where it cuts the sequence, else None.
    tp: the tensor-parallel group where each of its ranks routes all tokens, of which the first one counts.
    """

    pp: Group | None = None
    tp: Group | None = None
    sp: Group | None = None
    cp: Group | None = None
    dp: Group | None = None

    @property
    def summed(self) -> list[Group]:
        return [group for group in (self.pp, self.tp, self.sp, self.cp, self.dp) if group is not None]

    @property
    def counts_rows(self) -> bool:
        """Whether this rank adds the rows that its routers saw: each row once."""
        return self.tp is None or self.tp.rank() == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank adds the log ratios of its tokens, which every tensor-parallel rank has."""
        return self.counts_rows and (self.sp is None or self.sp.rank() == 0)

    @property
    def counts_samples(self) -> bool:
        """Whether this rank names samples, which all ranks of these groups know alike."""
        alike = (self.pp, self.tp, self.sp, self.cp)
        return all(group is None or group.rank() == group.size() - 1 for group in alike)


@dataclass(frozen=True)
class Seen:
    """What a step added up to over all ranks, on the host.

    table: sums by layer, kind and bucket of positions.
    split: sums of log ratios by class of token.
    mine: faults that this rank alone knows, in words.
    found: faults that the sums show, known to every rank.
    faulty: how many faults and strange samples all ranks found; above 0 on every rank alike.
    unknown: how often a router of any rank compared nothing in a micro-batch of the log-prob pass.
    """

    table: Float[Tensor, "L K P"]
    split: Float[Tensor, "C R"]
    mine: tuple[str, ...]
    found: tuple[str, ...]
    faulty: int
    unknown: int

    @property
    def compared(self) -> bool:
        """Whether any router of any rank compared anything; none does in a critic, or in a dense model."""
        return bool(self.table[:, KINDS.index("rows")].any())


def read(watch: Watch, groups: Groups) -> Seen:
    """Reduce and read what the watch saw since the last call: on every rank, between two steps."""
    assert watch.table is not None
    watch.end()
    samples: Sequence[Tensor] = ()
    if watch.passed:
        layers = torch.tensor(len(watch.watched), device=watch.table.device)
        pipeline = [] if groups.pp is None else [groups.pp]
        watch.gathered = gather(watch.passed, _summed(layers, pipeline), groups.pp, groups.sp, groups.cp)
        watch.passed, samples = [], watch.gathered.strange
    seen = _read(watch, groups, samples if groups.counts_samples else ())
    if not seen.compared:
        watch.gathered = None  # all tokens would seem to be routed alike
    return seen


def _read(watch: Watch, groups: Groups, samples: Sequence[Tensor]) -> Seen:
    assert watch.table is not None and watch.split is not None
    device, faults = watch.table.device, [str(fault) for fault in watch.faults.values()]
    unknown = torch.tensor(watch.unknown, device=device)
    strange = torch.cat(list(samples)).sum() if samples else torch.zeros((), device=device)
    parts = [watch.table, watch.split, _of_layers(watch).to(device), len(faults) + strange, unknown]
    for place, counts in enumerate((groups.counts_rows, groups.counts_tokens)):
        parts[place] = parts[place] if counts else torch.zeros_like(parts[place])
    packed = _summed(torch.cat([part.flatten().double() for part in parts]), groups.summed)
    packed, *on_host = (to_host(x) for x in (packed, *samples))
    Arrival.of_copies_from(watch.table).wait()
    table, split, of_layers, faulty, unknown = packed.split([part.numel() for part in parts])
    table = table.view_as(watch.table)
    found = list(of_table(table, *_read_layers(of_layers.view(3, -1))))
    watch.table, watch.faults = empty_table(watch.table.shape[0], device), {}
    watch.split = torch.zeros_like(watch.split)
    mine, number = (*faults, *_strange_samples(on_host)), round(faulty.item()) + len(found)
    return Seen(table, split.view(watch.split.shape), mine, tuple(found), number, round(unknown.item()))


def _of_layers(watch: Watch) -> Float[Tensor, "3 L"]:
    """Count the ranks that hold each layer, and add up their stages and how often unrelated rows look strange."""
    assert watch.table is not None
    rows = torch.zeros(3, watch.table.shape[0], dtype=torch.float64)
    for watched in watch.watched:
        rows[:, watched.layer] = torch.tensor([1, watch.stage, watched.random], dtype=torch.float64)
    return rows


def _read_layers(rows: Float[Tensor, "3 L"]) -> tuple[dict[int, int], dict[int, float]]:
    """The stage of each layer that has a router, and how often unrelated rows look strange there."""
    held = [(layer, row) for layer, row in enumerate(rows.T.tolist()) if row[0]]
    return {i: round(stage / n) for i, (n, stage, _) in held}, {i: share / n for i, (n, _, share) in held}


def _strange_samples(samples: Sequence[Tensor]) -> list[str]:
    return [
        of_sample(batch, sequence, strange)
        for batch, counts in enumerate(samples)
        for sequence, strange in enumerate(counts.tolist())
        if strange
    ]


def _summed(x: Tensor, groups: Sequence[Group]) -> Tensor:
    """Sum over the ranks of all groups, but for a group of torchft's that lost one: Miles goes on without it.

    Raises:
        RANK_LOST: a rank of another group died.
    """
    for group in groups:
        added, error = x.clone(), None
        try:
            all_reduce(added, group)
            error = getattr(group, "errored", lambda: None)()
        except RANK_LOST as met:
            if not hasattr(group, "errored"):
                raise
            error = met
        if error is None:
            x = added
        else:
            logger.warning(
                "routes of this step are those of this rank's cell alone: a rank was lost (%s)", error
            )
    return x


def metrics_of(seen: Seen) -> dict[str, float]:
    """The metrics of what a step added up to."""
    layers = [dict(zip(KINDS, row, strict=True)) for row in seen.table.sum(-1).tolist()]
    places = zip(POSITIONS, seen.table.sum(0).T.tolist(), strict=True)
    by_position = {start: dict(zip(KINDS, row, strict=True)) for start, row in places}
    classes = zip(CLASSES, seen.split.tolist(), strict=True)
    by_class = {kind: dict(zip(SPLIT, row, strict=True)) for kind, row in classes}
    return routing_metrics(layers, by_position, by_class)
