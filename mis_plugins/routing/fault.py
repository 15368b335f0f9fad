"""What can be wrong with a replay of routes, in words that name layer, stage and sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from mis_plugins.routing.table import KINDS, Ran

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
