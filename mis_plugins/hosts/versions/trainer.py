"""What the trainers of hosts do each in its own way, where versions are carried and log pi_{v+1} is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mis_plugins.hosts.versions.shelf import Waiting

Data = dict[str, Any]
PREFIX = "mis_next_"


@dataclass(frozen=True)
class Split:
    """How the work of a log-prob pass is split over ranks.

    budget: tokens of a micro-batch.
    ranks, rank: data-parallel ranks, and this one.
    multiple: the number of micro-batches of each rank is a multiple of this.
    answers: whether this rank tells the others what its share came to.
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
    package: dotted path of the package with the trainer's modules `actor` and `model`.
    notes: the key of a rollout that carries a note of each sample.
    cannot: arguments under which the version of log_probs would be another than the one named, and why.
    """

    title: str
    package: str
    notes: str
    cannot: Mapping[str, str]

    def check(self, args: Any, recomputes: bool) -> None:
        """Refuse arguments under which versions, or what is recomputed, would say something else."""

    def group(self) -> Any:
        """Return the host's group of all ranks on the CPU."""

    def waiting(self, actor: Any, version: int, trained: int) -> Waiting:
        """Ask for what waits, on one rank."""
        ...

    def split(self, actor: Any) -> Split:
        """Say how a log-prob pass is split."""
        ...

    def log_probs(
        self, actor: Any, rollout_id: int, data: Data, micro_batches: Sequence[list[int]]
    ) -> Sequence[Tensor] | None:
        """Score each sequence's last tokens by the host's own pass, whole; None off the last pipeline stage."""

    def cut(self, args: Any, data: Data, rows: Sequence[Tensor]) -> list[Tensor]:
        """Cut rows, one a sample, to the tokens on this rank, as the host cuts rollout_log_probs."""
        ...
