"""The optimal token baseline against a second implementation, one loop a token, and what it is in simple cases."""

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from tolerances import float64_atol
from torch import Tensor

from mis_plugins.loss.token_baseline import token_advantages
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks


@dataclass(frozen=True)
class Response:
    """One response, a number a token: reward, log pi_old, sum of squared probabilities, weight; and its prompt."""

    reward: list[float]
    log_prob: list[float]
    squares: list[float]
    weight: list[float]
    mask: list[bool]
    group: int
    valid: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "valid", [t for t, valid in enumerate(self.mask) if valid])

    def returns(self, rank: int) -> float:
        return math.fsum(self.reward[t] for t in self.valid[rank:])

    def path(self, rank: int) -> float:
        return math.fsum(
            self.weight[t] ** 2 * (1 - 2 * math.exp(self.log_prob[t]) + self.squares[t]) for t in self.valid[: rank + 1]
        )


def advantages_of(batch: list[Response]) -> list[list[float]]:
    found = [[0.0] * len(x.mask) for x in batch]
    for i, x in enumerate(batch):
        for rank, t in enumerate(x.valid):
            group = [y for y in batch if y.group == x.group and len(y.valid) > rank]
            total = math.fsum(y.path(rank) for y in group)
            mean = math.fsum(y.path(rank) * y.returns(rank) for y in group) / total
            found[i][t] = x.returns(rank) - (mean if len(group) > 1 else 0.0)
    return found


def random_batch(seed: int, lengths: tuple[int, ...] = (5, 9, 0, 7, 1, 6, 4)) -> list[Response]:
    rng = random.Random(seed)
    drawn = lambda n, low, high: [rng.uniform(low, high) for _ in range(n)]  # noqa: E731
    batch = []
    for i, n in enumerate(lengths):
        log_probs = drawn(n, -4, -0.01)
        squares = [math.exp(2 * x) + rng.random() * (1 - math.exp(x)) ** 2 for x in log_probs]
        mask = [rng.random() < 0.8 for _ in range(n)]
        batch.append(Response(drawn(n, -1, 1), log_probs, squares, drawn(n, 0, 2), mask, i % 3))
    return batch


def ours(batch: list[Response], weigh: bool = True) -> Tensor:
    flat = lambda name: torch.tensor([v for x in batch for v in getattr(x, name)], dtype=torch.float64)  # noqa: E731
    ragged = whole([len(x.mask) for x in batch]).place(flat("mask").bool(), Ranks())
    rows = flat("reward"), flat("log_prob"), flat("squares")
    weights = flat("weight") if weigh else None
    return token_advantages(*rows, ragged, torch.tensor([x.group for x in batch]), weights)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_the_twins(seed: int) -> None:
    batch = random_batch(seed)
    expected = [value for row in advantages_of(batch) for value in row]
    found = ours(batch)
    assert (found - torch.tensor(expected, dtype=torch.float64)).abs().max() <= float64_atol(100.0, len(expected))
    assert found.count_nonzero() == sum(len(x.valid) for x in batch)


@pytest.mark.parametrize("name", ["reward", "log_prob"])
def test_a_number_that_is_none_stays_in_its_group(name: str) -> None:
    batch = random_batch(0)
    expected, groups = ours(batch), torch.tensor([x.group for x in batch for _ in x.mask])
    getattr(batch[0], name)[batch[0].valid[0]] = math.nan
    assert torch.equal(ours(batch)[groups > 0], expected[groups > 0])


def test_equal_norms_leave_the_group_mean() -> None:
    """Two certain rewards of 1 and 0 at the end, and tokens of one probability and weight: half up, half down."""
    token = [-1.0] * 3, [0.3] * 3, [1e-3] * 3, [True] * 3
    batch = [Response([0.0, 0.0, reward], *token, 0) for reward in (1.0, 0.0)]
    expected = torch.tensor([0.5] * 3 + [-0.5] * 3, dtype=torch.float64)
    for weigh in (False, True):
        assert (ours(batch, weigh=weigh) - expected).abs().max() <= float64_atol(2.0, 6)


def test_tokens_that_were_certain_have_no_gradient_and_no_baseline() -> None:
    batch = [Response([reward], [0.0], [1.0], [1.0], [True], 0) for reward in (1.0, 0.0)]
    assert ours(batch).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("apart", [1.5, 2.0])
def test_norms_of_certain_tokens_that_round_below_0_leave_a_mean_of_the_returns(apart: float) -> None:
    """A sum of squares in float32 may be less than the square of its largest probability."""
    squares = 1 - 2**-24, 1 + apart * 2**-24
    batch = [Response([float(i)], [0.0], [squares[i]], [1.0], [True], 0) for i in range(2)]
    assert ours(batch).tolist() == [-1.0, 0.0]


def test_whole_rewards_and_narrow_groups_are_numbers_like_others() -> None:
    ragged = whole([100] * 4).place(torch.ones(400), Ranks())
    rows = torch.arange(400) % 3 == 0, torch.full((400,), -1.0), torch.full((400,), 0.3)
    expected = token_advantages(rows[0].float(), *rows[1:], ragged, torch.tensor([0, 1, 0, 1]) * 3)
    for rewards in (rows[0], rows[0].int()):
        advantages = token_advantages(rewards, *rows[1:], ragged, torch.tensor([0, 3, 0, 3], dtype=torch.int8))
        assert torch.equal(advantages, expected) and not torch.equal(advantages, advantages.round())


def test_what_lies_under_the_mask_does_not_count() -> None:
    batch = random_batch(3)
    hidden = []
    for x in batch:
        rows = {name: getattr(x, name) for name in ("reward", "log_prob", "squares", "weight")}
        poisoned = {
            name: [v if valid else math.nan for v, valid in zip(row, x.mask, strict=True)] for name, row in rows.items()
        }
        hidden.append(Response(**poisoned, mask=x.mask, group=x.group))
    assert torch.equal(ours(hidden), ours(batch))
