"""Metrics and faults from what the watch saw, reduced over all ranks and read once, at the step hook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.errors import logger
from mis_plugins.metrics.quantity import known, ratio_of
from mis_plugins.packing.collectives import RANK_LOST, Arrival, all_reduce, to_host
from mis_plugins.routing.placement import POSITIONS
from mis_plugins.routing.table import (
    CLASSES,
    KINDS,
    LOG_PROB,
    SPLIT,
    Group,
    Ran,
    faulty_layers,
    gather,
    of_layer,
    of_sample,
)
from mis_plugins.routing.watch import Watch


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
    def of_replica(self) -> list[Group]:
        """Groups whose ranks share samples, each with a part of them."""
        return [group for group in (self.pp, self.tp, self.sp, self.cp) if group is not None]

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
        return all(group.rank() == group.size() - 1 for group in self.of_replica)


@dataclass(frozen=True)
class Seen:
    """What a step added up to over all ranks, on the host.

    table: sums by layer, kind and bucket of positions.
    split: sums of log ratios by class of token.
    mine: faults that this rank alone knows, in words.
    faults: those of layers and of samples that the sums show, known to every rank that holds parts of the samples.
    tells: whether this rank logs `faults`; one of the ranks that know it does.
    faulty: how many faults and strange samples all ranks found; above 0 on every rank alike.
    unknown: how often a router of any rank compared nothing in a micro-batch of the log-prob pass.
    """

    table: Float[Tensor, "L K P"]
    split: Float[Tensor, "C R"]
    mine: tuple[str, ...]
    faults: tuple[str, ...]
    tells: bool
    faulty: int
    unknown: int

    @property
    def compared(self) -> bool:
        """Whether any router of any rank compared anything; none does in a critic, or in a dense model."""
        return bool(self.table[:, KINDS.index("rows")].any())


def read(watch: Watch, groups: Groups) -> Seen:
    """Reduce and read what the watch saw since the last call. Collective, between two steps."""
    watch.end()
    rollout = watch.rollout
    strange: Sequence[Tensor] = ()
    if rollout.passed:
        layers = torch.tensor(len(watch.watched), device=watch.sums.table.device)
        rollout.gathered = gather(rollout.passed, _summed(layers, [groups.pp]), groups.pp, groups.sp, groups.cp)
        rollout.passed, strange = [], rollout.gathered.strange
    seen = _read(watch, groups, strange)
    watch.sums = watch.sums.cleared()
    if not seen.compared:
        rollout.gathered = None  # else all tokens would seem to be routed alike
    return seen


def _read(watch: Watch, groups: Groups, strange: Sequence[Tensor]) -> Seen:
    sums, mine = watch.sums, tuple(str(fault) for fault in watch.sums.faults.values())
    device = sums.table.device
    named = [torch.cat(list(strange)).sum()] if strange and groups.counts_samples else []
    faulty, unknown = (torch.tensor(number, device=device) for number in (len(mine), watch.rollout.unknown))
    table = sums.table if groups.counts_rows else torch.zeros_like(sums.table)
    split = sums.split if groups.counts_tokens else torch.zeros_like(sums.split)
    parts = [table, split, _of_layers(watch).to(device), sum(named, faulty), unknown]
    samples = [batch.samples if groups.counts_rows else torch.zeros_like(batch.samples) for batch in sums.ran]
    packed = torch.cat([part.flatten().double() for part in (*parts, *samples)])
    of_replica = _summed(packed, groups.of_replica)
    sizes = [part.numel() for part in parts]
    whole, by_sample = of_replica.split([sum(sizes), of_replica.numel() - sum(sizes)])
    whole, by_sample, *strange = (to_host(x) for x in (_summed(whole, [groups.dp]), by_sample, *strange))
    Arrival.of_copies_from(sums.table).wait()
    table, split, of_layers, faulty, unknown = whole.split(sizes)
    table, (stage_of, random) = table.view_as(sums.table), _read_layers(of_layers.view(3, -1))
    layers = [*faulty_layers(table, random)]
    return Seen(
        table=table,
        split=split.view(sums.split.shape),
        mine=mine,
        faults=_faults(layers, stage_of, _read_samples(sums.ran, by_sample), strange),
        tells=groups.counts_samples,
        faulty=round(faulty.item()) + len(layers),
        unknown=round(unknown.item()),
    )


def _read_samples(ran: Sequence[Ran], sums: Float[Tensor, " N"]) -> list[Ran]:
    """The micro-batches with the sums of all ranks that hold parts of their samples."""
    pieces = sums.split([batch.samples.numel() for batch in ran])
    return [replace(batch, samples=piece.view_as(batch.samples)) for batch, piece in zip(ran, pieces, strict=True)]


def _faults(
    layers: Sequence[tuple[int, str]], stage_of: Mapping[int, int], ran: Sequence[Ran], strange: Sequence[Tensor]
) -> tuple[str, ...]:
    """Faults of layers in the samples of this replica, and of samples in most layers."""
    of_layers = (text for layer, kind in layers for text in of_layer(layer, kind, stage_of[layer], ran))
    passed = [batch for batch in ran if batch.part == LOG_PROB]
    of_samples = (
        of_sample(sample, batch, tokens, stage_of)
        for batch, counts in zip(passed, strange, strict=True)
        for sample, tokens in enumerate(counts.tolist())
        if tokens
    )
    return *of_layers, *of_samples


def _of_layers(watch: Watch) -> Float[Tensor, "3 L"]:
    """Count the ranks that hold each layer, and add up their stages and how often unrelated rows look strange."""
    rows = torch.zeros(3, watch.sums.table.shape[0], dtype=torch.float64)
    for watched in watch.watched:
        rows[:, watched.layer] = torch.tensor([1, watch.stage, watched.random], dtype=torch.float64)
    return rows


def _read_layers(rows: Float[Tensor, "3 L"]) -> tuple[dict[int, int], dict[int, float]]:
    """The stage of each layer that has a router, and how often unrelated rows look strange there."""
    held = [(layer, row) for layer, row in enumerate(rows.T.tolist()) if row[0]]
    return {i: round(stage / n) for i, (n, stage, _) in held}, {i: share / n for i, (n, _, share) in held}


def _summed(x: Tensor, groups: Sequence[Group | None]) -> Tensor:
    """Sum over the ranks of all groups, except a torchft group that lost a rank: Miles goes on without it.

    A group that is None has one rank. RANK_LOST is raised where a rank of another group died.
    """
    for group in groups:
        if group is None:
            continue
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
            logger.warning("routes of this step are those of this rank's cell alone: a rank was lost (%s)", error)
    return x


ROUTED = {
    "route_differs": ("differs", "tokens"),
    "route_strange": ("strange", "tokens"),
    "route_margin": ("margin", "differs"),
    "route_unequal": ("unequal", "rows"),
}
"""A metric of some layers and positions is one sum over (token, layer) divided by another (`routing/table.py`)."""
BY_CLASS = {
    "route_tokens": ("tokens", "all_tokens"),
    "route_kl_k3": ("k3", "tokens"),
    "route_share_of_k3": ("k3", "all_k3"),
    "route_tail": ("tail", "tokens"),
    "route_kept": ("kept", "tokens"),
}
"""A metric of one class of tokens is a sum over the class divided by a sum over that class or over all classes."""


def _named(names: Sequence[str], sums: Tensor) -> dict[str, float]:
    return dict(zip(names, sums.tolist(), strict=True))


def metrics_of(seen: Seen) -> dict[str, float]:
    """Every known metric of a step's routing, by name; the layer or place of a metric stands behind a slash."""
    places = {"": _named(KINDS, seen.table.sum((0, 2)))}
    places |= {f"/layer_{layer}": _named(KINDS, sums) for layer, sums in enumerate(seen.table.sum(-1))}
    by_position = zip(POSITIONS, seen.table.sum(0).T, strict=True)
    places |= {f"/position_{start}": _named(KINDS, sums) for start, sums in by_position}
    every = {f"all_{name}": value for name, value in _named(SPLIT, seen.split.sum(0)).items()}
    classes = {f"/{kind}": _named(SPLIT, sums) | every for kind, sums in zip(CLASSES, seen.split, strict=True)}
    return known(
        {
            name + place: ratio_of(sums[part], sums[whole])
            for metrics, of in ((ROUTED, places), (BY_CLASS, classes))
            for place, sums in of.items()
            for name, (part, whole) in metrics.items()
        }
    )
