"""The interface of a host's trainer where versions are carried and log pi_{v+1} is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mis_plugins.hosts.host import Parallel
from mis_plugins.hosts.needs.miles import Miles
from mis_plugins.hosts.needs.slime import Slime

Data = dict[str, Any]
CANNOT = {
    "keep_old_actor": "log_probs are then of earlier weights than those that the version names",
    "allgather_cp": "tokens are then laid out otherwise than recompute reads them",
}
"""Arguments of every host under which versions would say something else, and why."""
PREFIX = "mis_next_"


@dataclass(frozen=True)
class Split:
    """How the work of a log-prob pass is split over ranks.

    budget: tokens of a micro-batch.
    ranks, rank: data-parallel ranks, and this one.
    multiple: the number of micro-batches of each rank is a multiple of this.
    answers: whether this rank sends the log-probs of its share to the other ranks.
    """

    budget: int
    ranks: int
    rank: int
    multiple: int
    answers: bool


@runtime_checkable
class Trainer(Protocol):
    """A host's trainer on Megatron.

    title: the host, and the commit whose lines were read.
    needs: what the host must have.
    notes: the key of a rollout that carries a note of each sample.
    cannot: arguments beyond `CANNOT` under which versions would say something else, and why.
    """

    title: str
    notes: str
    cannot: Mapping[str, str]

    @property
    def needs(self) -> Miles | Slime: ...

    def check(self, args: Any, recomputes: bool) -> None:
        """Refuse arguments under which versions, or what is recomputed, would say something else."""

    def parallel(self) -> Parallel:
        """Return the process groups, and (size, rank) of context parallelism."""
        ...

    def weight_version(self, actor: Any) -> int:
        """Return the version of the weights that the trainer holds."""
        ...

    def split(self, actor: Any) -> Split:
        """Say how a log-prob pass is split."""
        ...

    def log_probs(
        self, actor: Any, rollout_id: int, data: Data, micro_batches: Sequence[list[int]]
    ) -> Sequence[Tensor] | None:
        """Score each sequence's last tokens by the host's own pass; None off the last pipeline stage."""
        ...
