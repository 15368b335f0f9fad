"""Log pi_{v+1} on the trainer's side: who is scored by which rank, and what was scored of a response.

A trainer that has just moved to V holds pi_V until its next optimizer step. So it scores the tokens of V - 1 when it
gets its next batch, before it trains: whatever these tokens' responses are by then, running, queued or on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.hosts.versions.note import Note
from mis_plugins.versions.recompute import Request, batches
from mis_plugins.versions.segment_wise import Written


@dataclass(frozen=True)
class Plan:
    """Which micro-batches each data-parallel rank scores: equally many, so that collectives inside the model meet.

    shares: a list of micro-batches a rank. A rank with fewer repeats the first one.
    """

    shares: Sequence[Sequence[Sequence[Request]]]

    @classmethod
    def of(cls, requests: Sequence[Request], budget: int, ranks: int, multiple: int) -> Plan:
        """Pack the requests, `budget` tokens a micro-batch; each rank's number of micro-batches is a multiple."""
        packed = batches(requests, budget)
        count = -(-len(packed) // (ranks * multiple)) * multiple
        shares = [packed[rank::ranks] for rank in range(ranks)]
        return cls([[*share, *[packed[0]] * (count - len(share))] for share in shares])


@dataclass(frozen=True)
class Scored:
    """Log-probs of some tokens of a response under one version."""

    by: int
    positions: Sequence[int]
    log_probs: Float[Tensor, " n"]


class Scores:
    """What was scored of each response that is not trained on yet."""

    def __init__(self) -> None:
        self._of: dict[int, list[Scored]] = {}

    def add(self, version: int, answers: Mapping[int, tuple[Sequence[int], Float[Tensor, " n"]]]) -> None:
        """Keep what `version` gives some tokens of each response."""
        for number, (positions, log_probs) in answers.items():
            self._of.setdefault(number, []).append(Scored(version, positions, log_probs))

    def keep(self, alive: AbstractSet[int]) -> None:
        """Forget all other responses."""
        self._of = {number: scored for number, scored in self._of.items() if number in alive}

    def written(self, note: Note, current: int) -> Written:
        """Versions of a response's tokens, and what the version after each token's own gave it; else NaN."""
        versions = torch.tensor(note.versions, dtype=torch.int64)
        recomputed = torch.full(versions.shape, torch.nan)
        for one in self._of.get(note.number, ()):
            places = torch.tensor(one.positions, dtype=torch.int64)
            fits = places < len(versions)
            places, log_probs = places[fits], one.log_probs[fits]
            next_one = versions[places] + 1 == one.by
            recomputed[places[next_one]] = log_probs[next_one]
        return Written(versions, recomputed, current)
