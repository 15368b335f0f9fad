"""A verifiable toy task: a string of digits to reverse.

Token ids 0 to 9 are the digits; `EOS` and `EQUALS` follow. A prompt is digits and `EQUALS`; an answer is the reversed
digits and `EOS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

EOS, EQUALS = 10, 11


@dataclass(frozen=True)
class Problem:
    """One prompt and its only right answer, as token ids; the answer ends with EOS."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A source of problems of so many random digits, and the judge of responses to them.

    vocab_size: a power of two, so that tensor parallelism splits the embedding evenly.
    """

    digits: int
    vocab_size: int = 16
    eos: int = EOS

    @property
    def max_response(self) -> int:
        """Tokens of the longest response worth sampling, EOS included."""
        return self.digits + 1

    def sample(self, count: int, generator: torch.Generator) -> list[Problem]:
        """Draw `count` problems independently."""
        drawn = torch.randint(0, 10, (count, self.digits), generator=generator)
        return [Problem((*digits, EQUALS), (*digits[::-1], EOS)) for digits in drawn.tolist()]

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        """1.0 for exactly the right answer, else 0.0."""
        return float(tuple(response) == problem.answer)
