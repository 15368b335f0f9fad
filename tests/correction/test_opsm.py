"""Off-policy sequence masking: against a second implementation, and what it has in common with a rejection rule."""

import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path

import loss_oracle
import pytest
import torch
import torch.distributed as dist
from loss_oracle import Response
from responses import LENGTHS, Held, Place, flat, over_four_ranks, ragged_of, split
from torch import Tensor

from mis_plugins.config.model import OpsmConfig
from mis_plugins.correction.opsm import Departure, on_policy, reference_policy, sequence_means
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks

DELTA = 0.0503  # no mean of a few log-probs on the grid lies near it
GRID = 2.0**-10  # log-probs on a grid: their sums are exact in float32


def random_responses(seed: int, lengths: Sequence[int] = (8, 1, 5, 0, 9, 4, 6)) -> list[Response]:
    """`old` is the proximal policy, `reference` the behavior policy; advantages of either sign in one sequence."""
    rng = random.Random(seed)
    on_grid = lambda x: round(x / GRID) * GRID  # noqa: E731
    batch = []
    for i, n in enumerate(lengths):
        target = [on_grid(rng.uniform(-4, -0.5)) for _ in range(n)]
        staleness, mismatch = (rng.choice([-0.1, 0.0, 0.1]) for _ in range(2))
        old = [p + on_grid(rng.gauss(staleness, 0.1)) for p in target]
        behavior = [p + on_grid(rng.gauss(mismatch, 0.1)) for p in old]
        sign = rng.choice([-1.0, 1.0, None])
        advantages = [on_grid(rng.gauss(0, 1) if sign is None else sign) for _ in range(n)]
        mask = [rng.random() < 0.8 and i != 5 for _ in range(n)]
        batch.append(Response(target, old, behavior, advantages, [1.0] * n, mask))
    return batch


def rows_of(batch: Sequence[Response]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the target and of the behavior policy, and advantages."""
    target, behavior, advantages = (flat(batch, name, torch.float32) for name in ("target", "reference", "advantages"))
    return target, behavior, advantages


def kept(batch: Sequence[Response], config: OpsmConfig, reference: Tensor | None = None) -> list[list[bool]]:
    target, behavior, advantages = rows_of(batch)
    behavior = behavior if reference is None else reference
    return split(on_policy(target, behavior, advantages, ragged_of(batch), config), batch)


@pytest.mark.parametrize("advantage", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(20))
def test_masks(seed: int, advantage: str):
    batch = random_responses(seed)
    expected = [loss_oracle.opsm_keep(x, x.reference, DELTA, advantage == "sequence") for x in batch]
    assert kept(batch, OpsmConfig(DELTA, advantage)) == expected  # type: ignore[arg-type]


def test_the_batches_decide_both_ways():
    batch = [x for seed in range(20) for x in random_responses(seed)]
    for advantage in ("token", "sequence"):
        keep = [k for row in kept(batch, OpsmConfig(DELTA, advantage)) for k in row]
        valid = [m for x in batch for m in x.mask]
        assert 0.1 < sum(keep) / sum(valid) < 0.9
    assert kept(batch, OpsmConfig(DELTA, "token")) != kept(batch, OpsmConfig(DELTA, "sequence"))


def test_strictly_above_delta():
    """A divergence of exactly delta stays, one step of the grid more goes; a good sequence stays whatever it is."""

    def one(gap: float, advantage: float) -> Response:
        rows = [-2.0, -1.0], [-2.0, -1.0], [-2.0 + gap, -1.0 + gap]
        return Response(*rows, [advantage] * 2, [1.0] * 2, [True] * 2)

    batch = [one(0.125, -1.0), one(0.125 + GRID, -1.0), one(9.0, 1.0), one(9.0, 0.0), one(-9.0, -1.0)]
    for config in (OpsmConfig(0.125, "token"), OpsmConfig(0.125, "sequence")):
        assert kept(batch, config) == [[True] * 2, [False] * 2, [True] * 2, [True] * 2, [True] * 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_unknown_divergence_counts_as_far(value: float):
    batch = random_responses(1, (4, 4, 4))
    signs = [-1.0, 1.0, -1.0]
    batch = [
        Response(x.target, x.target, x.target, [sign] * 4, x.factor, [True, True, False, True])
        for x, sign in zip(batch, signs, strict=True)
    ]
    reference = flat(batch, "reference", torch.float32)
    reference[[1, 5, 10]] = value  # a valid token of the first two, a masked one of the third
    valid = [True, True, False, True]
    assert kept(batch, OpsmConfig(DELTA), reference) == [[False] * 4, valid, valid]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_under_the_mask_counts(value: float):
    for batch in map(random_responses, range(5)):
        ragged, (target, reference, advantages) = ragged_of(batch), rows_of(batch)
        hidden = [x.masked_fill(~ragged.loss_mask, value) for x in (target, reference, advantages)]
        for config in (OpsmConfig(DELTA), OpsmConfig(DELTA, "sequence")):
            clean = on_policy(target, reference, advantages, ragged, config)
            assert torch.equal(on_policy(hidden[0], hidden[1], hidden[2], ragged, config), clean)


def test_means_over_the_valid_tokens():
    ragged = whole([3, 1]).place(torch.tensor([True, True, False, False]), Ranks())
    target, reference = torch.tensor([-2.0, -1.0, -9.0, -9.0]), torch.tensor([-1.5, -0.75, 0.0, 0.0])
    means = sequence_means(target, reference, torch.tensor([1.0, 2.0, 99.0, 99.0]), ragged)
    assert [mean.tolist() for mean in means] == [[0.375, 0.0], [1.5, 0.0]]


def test_behavior_falls_back_to_proximal_where_there_is_none_and_says_so_once(caplog: pytest.LogCaptureFixture):
    behavior, proximal = torch.zeros(2), torch.ones(2)
    assert reference_policy(behavior, proximal, OpsmConfig(DELTA)) is behavior
    for given in (behavior, None):
        assert reference_policy(given, proximal, OpsmConfig(DELTA, reference="proximal")) is proximal
    with caplog.at_level(logging.WARNING, "mis_plugins"):
        answers = [reference_policy(None, proximal, OpsmConfig(DELTA)) for _ in range(3)]
    assert all(answer is proximal for answer in answers)
    assert len(caplog.records) == 1
    assert "mis.opsm.reference: behavior" in caplog.text and "proximal" in caplog.text


@pytest.mark.parametrize("advantage", ["token", "sequence"])
def test_over_ranks(advantage: str, tmp_path: Path):
    """Ranks decide as one process does, and by their own tokens alone they would not."""
    batch = random_responses(2, LENGTHS)
    config = OpsmConfig(DELTA, advantage)  # type: ignore[arg-type]

    def work(held: Held, place: Place) -> list[Tensor]:
        target, reference, advantages = (held(name).float() for name in ("target", "reference", "advantages"))
        return [on_policy(target, reference, advantages, place(group), config) for group in (dist.group.WORLD, None)]

    together, alone = over_four_ranks(batch, work, tmp_path)
    assert together == kept(batch, config) != alone


def test_a_sequence_without_a_valid_token_departs_by_nothing():
    found = Departure.of([torch.zeros(1)] * 8)
    assert [x.item() for x in (found.divergence, found.mismatch, found.staleness, found.advantage)] == [0] * 4
