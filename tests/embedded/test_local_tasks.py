"""The toy task: its answers, and what a response earns."""

import torch

from lab.host.rollout.tasks import EOS, EQUALS, Task

TASK = Task(4)


def problems(seed: int = 0):
    return TASK.sample(50, torch.Generator().manual_seed(seed))


def test_the_answer_is_the_digits_backwards() -> None:
    for problem in problems():
        assert problem.prompt[-1] == EQUALS and len(problem.prompt) == 5
        assert problem.answer == (*problem.prompt[-2::-1], EOS)
        assert len(problem.answer) == TASK.max_response and TASK.eos == EOS
        assert all(0 <= token < TASK.vocab_size for token in (*problem.prompt, *problem.answer))
    assert len({problem.prompt for problem in problems()}) > 40
    assert problems() == problems() != problems(seed=1)


def test_only_the_exact_answer_earns_the_reward() -> None:
    problem = problems()[0]
    wrong = (problem.answer[0] + 1, *problem.answer[1:])
    assert TASK.reward(problem, list(problem.answer)) == 1.0
    for response in (wrong, problem.answer[:-1], (*problem.answer, EOS), ()):
        assert TASK.reward(problem, response) == 0.0
