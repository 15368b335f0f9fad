"""Sums of routes on the device: by layer and position, by layer and sample, and counts for each token.

`faulty_layers` finds what the sums show to be wrong with a replay of routes, and `of_layer` and `of_sample` say it in
words. A `Fault` is what a hook saw without sums.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from mis_plugins.config.terms.divergence import k3
from mis_plugins.correction.pipeline import Correction
from mis_plugins.routing.choice import Compared
from mis_plugins.routing.placement import Placement, first_of

LOG_PROB, TRAIN = "log_prob", "train"  # passes that are watched
KINDS: tuple[str, ...] = ("tokens", "differs", "strange", "margin", "rows", "unequal", "broken")
# Own routing agrees here and before; differs here; differs before.
CLASSES: tuple[str, ...] = ("same", "other", "earlier")
SPLIT: tuple[str, ...] = ("tokens", "k3", "tail", "kept")
TAIL = 0.5  # nats of a log ratio
Group = dist.ProcessGroup


@dataclass(frozen=True)
class Passed:
    """One micro-batch of a pass: for each row the number of layers that routed it differently, and strangely.

    counts: two rows, of `differs` and `strange` layers, for the rows that this rank routes.
    samples: sums by layer, kind and sequence, of the rows that this rank routes.
    """

    placed: Placement
    counts: Int[Tensor, "2 T"]
    samples: Float[Tensor, "L K S"]

    @classmethod
    def begin(cls, placed: Placement, layers: int) -> "Passed":
        """No layer has routed the micro-batch yet."""
        rows, device = placed.here(placed.position).numel(), placed.position.device
        samples = torch.zeros(layers, len(KINDS), placed.sequences, dtype=torch.float64, device=device)
        return cls(placed, torch.zeros(2, rows, dtype=torch.int32, device=device), samples)

    def add(self, layer: int, table: Float[Tensor, "L K P"], compared: Compared) -> None:
        """Add what one layer did to the table of the step, to the sums of samples and to the counts of tokens."""
        counted, bucket = self.placed.here(self.placed.counted), self.placed.here(self.placed.bucket)
        both = torch.stack([compared.differs, compared.strange])
        self.counts.add_(both)
        differs, strange = both & counted
        margin = torch.where(differs, compared.margin, 0)
        ones = torch.ones_like(counted)
        rows = [counted, differs, strange, margin, ones, compared.unequal, compared.broken]
        sums = torch.stack([row.double() for row in rows])
        table[layer].index_add_(1, bucket, sums)
        self.samples[layer].index_add_(1, self.placed.here(self.placed.sequence), sums)


@dataclass(frozen=True)
class Ran:
    """What routers did in one micro-batch of a pass, sample by sample.

    part: the pass.
    batch: number of the micro-batch in its pass.
    samples: sums by layer, kind and sequence.
    """

    part: str
    batch: int
    samples: Float[Tensor, "L K S"]

    def of(self, layer: int, kind: str) -> list[float]:
        """The sums of one layer, sample by sample."""
        return self.samples[layer, KINDS.index(kind)].tolist()

    def __str__(self) -> str:
        return f"micro-batch {self.batch}{' in training' if self.part == TRAIN else ''}"


@dataclass(frozen=True)
class Flags:
    """Flags of each row of a micro-batch from the log-prob pass, over all layers, before ranks cut its rows.

    differs: how many layers the trainer alone would route otherwise.
    kind: index among `CLASSES`.
    """

    differs: Int[Tensor, " n"]
    kind: Int[Tensor, " n"]


@dataclass(frozen=True)
class Gathered:
    """Flags of each micro-batch of a log-prob pass, and how many strange tokens each of its sequences has."""

    flags: tuple[Flags, ...]
    strange: tuple[Float[Tensor, " _"], ...]


def gather(
    passed: Sequence[Passed], layers: Int[Tensor, ""], pp: Group | None, sp: Group | None, cp: Group | None
) -> Gathered:
    """Gather a pass over stages and over the ranks that hold other rows: three collectives, however many sequences.

    Args:
        layers: routers of the whole model that replay; a token is strange where more than half of them find it so.
    """
    counts = torch.cat([batch.counts for batch in passed], dim=1)
    if pp is not None:
        dist.all_reduce(counts, group=pp)
    whole = _over_sequence_parallel(counts, passed, sp)
    differs = [rows[0] for rows in whole]
    strange = [(2 * rows[1] > layers) & batch.placed.counted for rows, batch in zip(whole, passed, strict=True)]
    first = [first_of(rows > 0, batch.placed) for rows, batch in zip(differs, passed, strict=True)]
    sums = [_per_sequence(marked, batch.placed) for marked, batch in zip(strange, passed, strict=True)]
    if cp is not None:
        packed = torch.cat([*first, *sums])
        parts = [torch.empty_like(packed) for _ in range(cp.size())]
        dist.all_gather(parts, packed, group=cp)
        lengths = [batch.placed.sequences for batch in passed]
        firsts, counted = torch.stack(parts).split(packed.numel() // 2, dim=1)
        first, sums = list(firsts.amin(0).split(lengths)), list(counted.sum(0).split(lengths))
    flags = [_flags(*each) for each in zip(differs, first, passed, strict=True)]
    return Gathered(tuple(flags), tuple(sums))


def _over_sequence_parallel(
    counts: Int[Tensor, "2 A"], passed: Sequence[Passed], sp: Group | None
) -> list[Int[Tensor, "2 _"]]:
    """The counts of each micro-batch, whole: the ranks of the group hold its rows one after the other."""
    lengths = [batch.counts.shape[1] for batch in passed]
    if sp is None:
        return list(counts.split(lengths, dim=1))
    parts = [torch.empty_like(counts) for _ in range(sp.size())]
    dist.all_gather(parts, counts.contiguous(), group=sp)
    pieces = zip(*(part.split(lengths, dim=1) for part in parts), strict=True)
    return [torch.cat(of_ranks, dim=1) for of_ranks in pieces]


def _per_sequence(marked: Tensor, placed: Placement) -> Float[Tensor, " S"]:
    sums = torch.zeros(placed.sequences, dtype=torch.float64, device=marked.device)
    return sums.index_add_(0, placed.sequence, marked.double())


def _flags(differs: Int[Tensor, " n"], first: Float[Tensor, " S"], passed: Passed) -> Flags:
    placed = passed.placed
    earlier = first[placed.sequence] < placed.position
    kind = torch.where(differs > 0, 1, torch.where(earlier, 2, 0))
    return Flags(differs, kind)


def split(correction: Correction, kind: Int[Tensor, " T"]) -> Float[Tensor, "C R"]:
    """Sums of `SPLIT` over the usable tokens of a micro-batch, by `CLASSES`."""
    usable, log_ratio = correction.stage.usable, correction.log_ratio
    tail, kept = log_ratio.abs() > TAIL, usable & correction.keep
    rows = torch.stack([row.double() for row in (usable, k3(log_ratio), tail & usable, kept)], dim=1)
    sums = rows.new_zeros(len(CLASSES), len(SPLIT))
    return sums.index_add_(0, kind, torch.where(usable.unsqueeze(1), rows, 0))


Kind = Literal["no_queue", "empty", "skipped", "calls"]
WORDS: Mapping[Kind, str] = {
    "no_queue": "the host replays, and keeps no recorded routes for this router: the layer was left out",
    "empty": "no recorded rows are left for this micro-batch",
    "skipped": "the router consumed no recorded rows and routed by its own gates; --moe-router-fusion does so, because "
    "it returns before the replay: drop that flag",
    "calls": "the router ran in {ran} micro-batches of the pass",
}
COUNTED: Mapping[str, tuple[str, str]] = {  # by fault: the kind that it is counted out of, and words
    "unequal": ("rows", "rows were used with other experts than recorded"),
    "broken": ("rows", "recorded rows name an expert twice, or one that does not exist"),
    "strange": (
        "tokens",
        "tokens share less than half of their recorded experts with the router's own: the rows belong to another "
        "layer, stage or sample",
    ),
}


@dataclass(frozen=True)
class Fault:
    """One way in which a layer did not replay what was recorded for it.

    layer: index among all layers of the model, from 0.
    ran: for the kind `calls`, `n of m` micro-batches in which the router ran; else empty.
    """

    kind: Kind
    layer: int
    stage: int
    batch: int
    ran: str = ""

    def __str__(self) -> str:
        words = WORDS[self.kind].format(ran=self.ran)
        where = "" if self.ran else f", all samples of micro-batch {self.batch}"
        return f"layer {self.layer} (pipeline stage {self.stage}){where}: {words}"


def faulty_layers(table: Float[Tensor, "L K P"], random: Mapping[int, float]) -> Iterator[tuple[int, str]]:
    """Layers of which the sums of a step show a fault, each with its kind. The table should be on the host.

    Args:
        random: how often unrelated rows would look strange, by layer; half of that share is a fault.
    """
    for layer, sums in enumerate(table.sum(-1).tolist()):
        row = dict(zip(KINDS, sums, strict=True))
        yield from ((layer, kind) for kind in ("unequal", "broken") if row[kind])
        if row["tokens"] and row["strange"] / row["tokens"] > random.get(layer, 1.0) / 2:
            yield layer, "strange"


def of_layer(layer: int, kind: str, stage: int, ran: Sequence[Ran]) -> Iterator[str]:
    """The fault of a layer, in the sample that has most of it; nothing where another replica has all such samples."""
    whole, words = COUNTED[kind]
    places = [
        (many, out_of, sample, batch)
        for batch in ran
        for sample, (many, out_of) in enumerate(zip(batch.of(layer, kind), batch.of(layer, whole), strict=True))
        if many
    ]
    if not places:
        return
    many, out_of, sample, batch = max(places, key=itemgetter(0))
    more = f"; so it is in {len(places) - 1} more samples" if len(places) > 1 else ""
    where = f"layer {layer} (pipeline stage {stage}), sample {sample} of {batch}"
    yield f"{where}: {many:.0f} of {out_of:.0f} {words}{more}"


def of_sample(sample: int, batch: Ran, strange: float, stage_of: Mapping[int, int]) -> str:
    """The fault of a sample with repeated, stale or missing rows, and the layers that find rows strange."""
    by_stage: dict[int, list[str]] = {}
    for layer, stage in stage_of.items():
        if batch.of(layer, "strange")[sample]:
            by_stage.setdefault(stage, []).append(str(layer))
    layers = "; ".join(f"layers {', '.join(each)} (pipeline stage {stage})" for stage, each in by_stage.items())
    return (
        f"sample {sample} of {batch}, {layers}: {strange:.0f} tokens share less than half of their recorded experts "
        "with most routers: rows of another token, repeated, stale or missing"
    )
