"""Tokens that version v wrote, to be scored while v + 1 is still the trainer's version: after the update nobody can.

Before the weights move on from V, pi_V scores the tokens of V - 1 in every response that is not in training yet,
running or finished. Tokens of V itself are scored one update later. A token that is trained on at age 1 needs no stored
score: the trainer's own log-prob is log pi_{v+1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mis_plugins.errors import ConfigError, InputError


@dataclass(frozen=True)
class Request:
    """The tokens of one response that are to be scored.

    tokens: prompt and response up to the last wanted token, whose log-prob no later token can change.
    positions: where the wanted tokens stand in the response.
    """

    number: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of tokens to score: all from the first wanted token to the last."""
        return self.positions[-1] - self.positions[0] + 1

    def wanted(self, log_probs: Sequence[float]) -> list[float]:
        """Pick the log-probs of the wanted tokens from those of all scored tokens."""
        if len(log_probs) != self.count:
            raise InputError(
                f"score: {len(log_probs)} log-probs for a sequence of which {self.count} were asked for; return those "
                "of its last tokens"
            )
        return [float(log_probs[position - self.positions[0]]) for position in self.positions]


def batches(waiting: Sequence[Request], budget: int) -> list[list[Request]]:
    """Pack requests into batches by first fit: at most `budget` tokens each, or one sequence that is longer."""
    if budget < 1:
        raise ConfigError(f"recompute budget: got {budget} tokens; give at least 1")
    packed: list[list[Request]] = []
    room: list[int] = []
    for request in waiting:
        size = len(request.tokens)
        place = next((i for i, left in enumerate(room) if left >= size), len(packed))
        if place == len(packed):
            packed.append([])
            room.append(budget)
        packed[place].append(request)
        room[place] -= size
    return packed
