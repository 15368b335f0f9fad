"""The toy tasks: answers against arithmetic done otherwise, and what a response earns."""

import pytest
import torch

from lab.host.rollout.tasks import EOS, EQUALS, PLUS, TASKS
from mis_plugins.errors import ConfigError


def problems(name: str, digits: int = 4, count: int = 50, seed: int = 0):
    return TASKS[name](digits).sample(count, torch.Generator().manual_seed(seed))


def test_reverse_answers_the_digits_backwards() -> None:
    for problem in problems("reverse"):
        assert problem.prompt[-1] == EQUALS
        assert problem.answer == (*problem.prompt[-2::-1], EOS)


def test_sort_answers_the_same_digits_in_order() -> None:
    for problem in problems("sort"):
        digits = problem.answer[:-1]
        assert sorted(problem.prompt[:-1]) == list(digits)
        assert all(left <= right for left, right in zip(digits, digits[1:], strict=False))


def test_add_answers_the_sum_from_the_ones_up() -> None:
    def value(digits: tuple[int, ...]) -> int:
        return sum(digit * 10**power for power, digit in enumerate(digits))

    for problem in problems("add", digits=3):
        plus = problem.prompt.index(PLUS)
        first, second = problem.prompt[:plus], problem.prompt[plus + 1 : -1]
        assert value(problem.answer[:-1]) == value(first[::-1]) + value(second[::-1])
        assert len(problem.answer) == 3 + 2


@pytest.mark.parametrize("name", TASKS)
def test_sizes_hold_for_every_problem(name: str) -> None:
    task = TASKS[name](4)
    for problem in problems(name):
        assert len(problem.prompt) == (2 if name == "add" else 1) * 5
        assert len(problem.answer) <= task.max_response and problem.answer[-1] == task.eos
        assert all(0 <= token < task.vocab_size for token in (*problem.prompt, *problem.answer))


@pytest.mark.parametrize("name", TASKS)
def test_only_the_exact_answer_earns_the_reward(name: str) -> None:
    task = TASKS[name](3)
    problem = problems(name, digits=3, count=1)[0]
    wrong = (problem.answer[0] + 1, *problem.answer[1:])
    assert task.reward(problem, list(problem.answer)) == 1.0
    for response in (wrong, problem.answer[:-1], (*problem.answer, EOS), ()):
        assert task.reward(problem, response) == 0.0


def test_the_generator_decides_the_problems() -> None:
    assert problems("sort", seed=1) == problems("sort", seed=1)
    assert problems("sort", seed=1) != problems("sort", seed=2)


def test_no_digits_is_refused() -> None:
    with pytest.raises(ConfigError, match="task reverse: digits: got 0; give at least 1"):
        TASKS["reverse"](0)
