"""Verifiable toy tasks: strings of digits to reverse, to sort, or to add.

Token ids 0 to 9 are the digits; `EOS`, `EQUALS` and `PLUS` follow. A prompt is the operands joined by
`PLUS` and closed by `EQUALS`; an answer is its digits and `EOS`. Every task has the same vocabulary, so one
model serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from mis_plugins.errors import ConfigError

EOS, EQUALS, PLUS = 10, 11, 12
VOCAB_SIZE = 16  # a power of two, so that tensor parallelism splits the embedding evenly

Digits = Sequence[int]


@dataclass(frozen=True)
class Problem:
    """One prompt and its only right answer, as token ids; the answer ends with the task's EOS."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@runtime_checkable
class Task(Protocol):
    """A source of problems and the judge of responses to them."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def max_response(self) -> int:
        """Tokens of the longest response worth sampling, EOS included."""
        ...

    def sample(self, count: int, generator: torch.Generator) -> list[Problem]:
        """Draw `count` problems independently."""
        ...

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        """1.0 for exactly the right answer, else 0.0."""
        ...


def reverse(operands: Sequence[Digits]) -> list[int]:
    """Reverse the digits of one operand: `[[1, 2, 3]] -> [3, 2, 1]`."""
    (digits,) = operands
    return list(reversed(digits))


def sort(operands: Sequence[Digits]) -> list[int]:
    """Sort the digits of one operand: `[[2, 3, 1]] -> [1, 2, 3]`."""
    (digits,) = operands
    return sorted(digits)


def add(operands: Sequence[Digits]) -> list[int]:
    """Add the operands, the ones first, as carries become known: `[[1, 7], [0, 5]] -> [2, 2, 0]`, 17 + 05 = 022."""
    width = len(operands[0]) + 1
    total = sum(int("".join(map(str, digits))) for digits in operands)
    return [int(digit) for digit in reversed(f"{total:0{width}d}")]


@dataclass(frozen=True)
class DigitTask:
    """A `Task` over `operands` random strings of `digits` digits; `solve` gives the answer's digits."""

    name: str
    digits: int
    operands: int
    solve: Callable[[Sequence[Digits]], list[int]]
    answer_digits: int
    vocab_size: int = VOCAB_SIZE
    eos: int = EOS

    @property
    def max_response(self) -> int:
        return self.answer_digits + 1

    def sample(self, count: int, generator: torch.Generator) -> list[Problem]:
        drawn = torch.randint(0, 10, (count, self.operands, self.digits), generator=generator)
        return [self._problem(operands) for operands in drawn.tolist()]

    def reward(self, problem: Problem, response: Sequence[int]) -> float:
        return float(tuple(response) == problem.answer)

    def _problem(self, operands: Sequence[Digits]) -> Problem:
        joined = [token for digits in operands for token in (*digits, PLUS)]
        return Problem((*joined[:-1], EQUALS), (*self.solve(operands), EOS))


def _digit_task(
    name: str, operands: int, solve: Callable[[Sequence[Digits]], list[int]], carry: int, digits: int
) -> Task:
    if digits < 1:
        raise ConfigError(f"task {name}: digits: got {digits}; give at least 1")
    return DigitTask(name, digits, operands, solve, answer_digits=digits + carry)


TASKS: dict[str, Callable[[int], Task]] = {
    "reverse": partial(_digit_task, "reverse", 1, reverse, 0),
    "sort": partial(_digit_task, "sort", 1, sort, 0),
    "add": partial(_digit_task, "add", 2, add, 1),
}
"""Task by name, called with the digits of an operand."""
