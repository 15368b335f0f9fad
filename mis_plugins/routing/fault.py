"""What can be wrong with a replay of routes, in words that name layer, stage and sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from mis_plugins.routing.table import KINDS

Kind = Literal["no_queue", "empty", "skipped", "calls"]
WORDS: Mapping[Kind, str] = {
    "no_queue": "the host replays, and keeps no recorded routes for this router: the layer was left out",
    "empty": "no recorded rows are left for this micro-batch",
    "skipped": "the router consumed no recorded rows and routed by its own gates; --moe-router-fusion does so, because "
    "it returns before the replay: drop that flag",
    "calls": "the router ran in {ran} micro-batches of the pass",
}
COUNTED = {
    "unequal": "rows were used with other experts than recorded",
    "broken": "recorded rows name an expert twice, or one that does not exist",
}


@dataclass(frozen=True)
class Fault:
    """One way in which a layer did not replay what was recorded for it.

    layer: index among all layers of the model, from 0.
    ran: in how many micro-batches of how many the router ran, for the kind that says so.
    """

    kind: Kind
    layer: int
    stage: int
    batch: int
    ran: str = ""

    def __str__(self) -> str:
        words = WORDS[self.kind].format(ran=self.ran)
        return f"layer {self.layer} (pipeline stage {self.stage}), micro-batch {self.batch}: {words}"


def of_table(
    table: Float[Tensor, "L K P"], stage_of: Mapping[int, int], random: Mapping[int, float]
) -> Iterator[str]:
    """Faults that the sums of a step show, layer by layer. The table should be on the host.

    Args:
        random: how often unrelated rows would look strange, by layer; half of that share is a fault.
    """
    for layer, sums in enumerate(table.sum(-1).tolist()):
        row = dict(zip(KINDS, sums, strict=True))
        name = f"layer {layer} (pipeline stage {stage_of.get(layer, '?')})"
        for kind, words in COUNTED.items():
            if row[kind]:
                yield f"{name}: {row[kind]:.0f} of {row['rows']:.0f} {words}"
        if row["tokens"] and row["strange"] / row["tokens"] > random.get(layer, 1.0) / 2:
            yield (
                f"{name}: {row['strange'] / row['tokens']:.0%} of the tokens share less than half of their recorded "
                "experts with the router's own: the rows belong to another layer, stage or sample"
            )


def of_sample(batch: int, sequence: int, strange: float) -> str:
    """The fault of a sample whose rows repeat, are stale or are missing."""
    return (
        f"sample {sequence} of micro-batch {batch}: {strange:.0f} tokens share less than half of their recorded "
        "experts with most routers: rows of another token, repeated, stale or missing"
    )
