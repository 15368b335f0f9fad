"""Log pi_{v+1} on the trainer's side: which rank scores which responses, and the scores of each response.

A trainer that has just moved to version V holds pi_V until its next optimizer step. So it scores the tokens
of V - 1 when it gets its next batch, before it trains, whether their responses are running, queued or on
their way by then.
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
    """The micro-batches of each data-parallel rank: equally many, so that the model's collectives meet.

    shares: by rank, a list of micro-batches. A rank with fewer is filled up with the first of all
        micro-batches.
    """

    shares: Sequence[Sequence[Sequence[Request]]]

    @classmethod
    def of(cls, requests: Sequence[Request], budget: int, ranks: int, multiple: int) -> Plan:
        """Pack requests into micro-batches of `budget` tokens, a multiple of `multiple` for each rank."""
        packed = batches(requests, budget)
        count = -(-len(packed) // (ranks * multiple)) * multiple
        shares = [packed[rank::ranks] for rank in range(ranks)]
        return cls([[*share, *[packed[0]] * (count - len(share))] for share in shares])


@dataclass(frozen=True)
class Scored:
    """Log-probs under version `by` of some tokens of a response, at these `positions` in the response."""

    by: int
    positions: Sequence[int]
    log_probs: Float[Tensor, " n"]


class Scores:
    """Scores of the responses that are not trained on yet."""

    def __init__(self) -> None:
        self._of: dict[int, list[Scored]] = {}

    def add(self, version: int, answers: Mapping[int, tuple[Sequence[int], Float[Tensor, " n"]]]) -> None:
        """Keep the log-probs that `version` gives to some tokens of each response."""
        for number, (positions, log_probs) in answers.items():
            self._of.setdefault(number, []).append(Scored(version, positions, log_probs))

    def keep(self, alive: AbstractSet[int]) -> None:
        """Forget all other responses."""
        self._of = {number: scored for number, scored in self._of.items() if number in alive}

    def written(self, note: Note, current: int) -> Written:
        """Versions v of a response's tokens, and their log pi_{v+1} where it was scored, else NaN."""
        versions = torch.tensor(note.versions, dtype=torch.int64)
        recomputed = torch.full(versions.shape, torch.nan)
        for one in self._of.get(note.number, ()):
            places = torch.tensor(one.positions, dtype=torch.int64)
            fits = places < len(versions)
            places, log_probs = places[fits], one.log_probs[fits]
            next_one = versions[places] + 1 == one.by
            recomputed[places[next_one]] = log_probs[next_one]
        return Written(versions, recomputed, current)
