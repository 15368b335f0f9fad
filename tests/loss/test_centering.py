"""Score centering against a dense float64 oracle, by identities, over tensor-parallel ranks, and by its memory."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import center_oracle
import pytest
import torch
import torch.distributed as dist
from center_oracle import WEIGHTS, Position, largest_error
from launch import run_ranks
from tolerances import EPS64
from torch import Tensor

from lab.tallies import peak_bytes, tally
from mis_plugins.config.model import WeightConfig
from mis_plugins.loss import centering
from mis_plugins.loss.centering import Candidates, Center, Vocabulary, Weigh, center, weigh_with

VOCABULARY, LOWER, UPPER, TEMPERATURE = 12, 0.75, 1.3, 0.7
KINDS = (None, *WEIGHTS)
CLEAR = 1e-3  # how far ratios keep from a bound, so that float32 decides as float64 does


def weigh_by(bound: str | None) -> Weigh:
    given = center_oracle.weight(bound, LOWER, UPPER)
    return weigh_with(None if given is None else WeightConfig("token", **given))


weigh_of = partial(center_oracle.weigh_of, low=LOWER, high=UPPER)


def softmax(logits: Sequence[float], kept: Sequence[int] | None = None) -> list[float]:
    allowed = range(len(logits)) if kept is None else kept
    masses = torch.tensor([x if v in allowed else -torch.inf for v, x in enumerate(logits)], dtype=torch.float64)
    return masses.softmax(0).tolist()


def positions(seed: int, size: int, whole: bool = False, sharpness: float = 1.5, count: int = 6) -> list[Position]:
    """Positions whose ratios keep clear of every bound; the sampled token lies within the head at some alone."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        logits = [draw.gauss(0, sharpness) for _ in range(VOCABULARY)]
        engine = [x + draw.gauss(0, 0.3) for x in logits]
        head = sorted(range(VOCABULARY), key=lambda v: -engine[v])[:size]
        q = softmax(engine, head if whole else None)
        sampled = draw.choices(range(VOCABULARY), q)[0] if len(found) % 2 or whole else draw.randrange(VOCABULARY)
        p = softmax(logits, head if whole else None)
        tails = [max(1 - sum(side[v] for v in head), 1e-6) for side in (p, q)]
        ratios = [p[v] / q[v] for v in range(VOCABULARY) if q[v] > 0] + [tails[0] / tails[1]] * (not whole)
        if all(abs(r - bound) > CLEAR for r in ratios for bound in (LOWER, UPPER)):
            found.append(Position(logits, q, sampled, head, whole))
    return found


def candidates_of(batch: Sequence[Position], dtype: torch.dtype, padding: int = 0) -> Candidates:
    """The head of each position, and entries beyond it that are padded with an id of the head."""
    return Candidates(
        rows=torch.arange(1, len(batch) + 1),
        sampled=torch.tensor([one.sampled for one in batch]),
        ids=torch.tensor([[*one.head, *[one.head[0]] * padding] for one in batch], dtype=torch.int32),
        behavior=torch.tensor(
            [[one.engine[v] for v in one.head] + [0.0] * padding for one in batch], dtype=torch.float64
        ).log().to(dtype),
    )  # fmt: skip


def all_of(batch: Sequence[Position]) -> Tensor:
    return torch.ones(len(batch), dtype=torch.bool)


def logits_of(batch: Sequence[Position], dtype: torch.dtype) -> Tensor:
    """[R, V] with a row before and after those that score a position, each times the temperature."""
    idle = [[0.0] * VOCABULARY]
    rows = torch.tensor([*idle, *(list(one.logits) for one in batch), *idle], dtype=torch.float64)
    return (rows * TEMPERATURE).to(dtype).requires_grad_()


def target_of(batch: Sequence[Position], logits: Tensor) -> Tensor:
    """The host's log-prob of each sampled token, over its kept set where there is one."""
    rows = logits[1:-1] / TEMPERATURE
    kept = torch.stack([center_oracle.support(one) | torch.tensor(not one.whole) for one in batch])
    return torch.where(kept, rows, -torch.inf).log_softmax(-1).gather(
        -1, torch.tensor([[one.sampled] for one in batch])
    )[:, 0]  # fmt: skip


def surrogates(batch: Sequence[Position], weigh: Weigh, logits: Tensor, padding: int = 0) -> tuple[Tensor, Center]:
    """sg(w) log p less the centering term, by ours."""
    target = target_of(batch, logits)
    behavior = torch.tensor([one.engine[one.sampled] for one in batch], dtype=torch.float64).log()
    term = center(logits, target, all_of(batch), candidates_of(batch, logits.dtype, padding), weigh, TEMPERATURE)
    return weigh(target.detach() - behavior) * target - term.log_probs, term


SHAPES = [pytest.param(4, False, id="top-4"), pytest.param(5, True, id="whole"), pytest.param(1, False, id="top-1"),
          pytest.param(VOCABULARY, False, id="all")]  # fmt: skip


@pytest.mark.parametrize(("size", "whole"), SHAPES)
@pytest.mark.parametrize("bound", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_is_the_oracles(bound: str | None, size: int, whole: bool, dtype: torch.dtype) -> None:
    batch = positions(3, size, whole)
    logits = logits_of(batch, dtype)
    found, term = surrogates(batch, weigh_by(bound), logits, padding=2)
    assert torch.equal(surrogates(batch, weigh_by(bound), logits.detach(), padding=2)[1].log_probs, term.log_probs)
    advantages = torch.linspace(-1.5, 2, len(batch), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * advantages).sum(), logits)
    wanted = torch.stack([center_oracle.gradient(one, weigh_of(bound)) for one in batch])
    wanted = wanted * advantages[:, None] / TEMPERATURE
    rtol = 1e-6 if dtype == torch.float32 else 1e3 * EPS64
    assert largest_error(gradient[1:-1], wanted) < rtol
    assert not gradient[[0, -1]].any()


@pytest.mark.parametrize("bound", KINDS)
def test_a_constant_reward_moves_nothing_where_the_head_is_the_vocabulary(bound: str | None) -> None:
    """The mean of the gradient over what the engine samples is 0, and is not 0 without the centering term."""
    (one,) = positions(5, VOCABULARY, count=1)
    mean = torch.zeros(2, VOCABULARY, dtype=torch.float64)
    for sampled, probability in enumerate(one.engine):
        batch = [Position(one.logits, one.engine, sampled, one.head)]
        logits = logits_of(batch, torch.float64)
        found, term = surrogates(batch, weigh_by(bound), logits)
        for i, value in enumerate((found, found + term.log_probs)):
            (gradient,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
            mean[i] += probability * gradient[1]
    assert mean[0].abs().max() < 1e-15
    if bound != "none":  # without a bound p / q times q is p, under which the mean of the score is 0
        assert mean[1].norm() > 1e-3
        torch.testing.assert_close(mean[1].norm() * TEMPERATURE, term.drift[0].double())


def test_a_tail_of_a_millionth_is_as_exact_as_its_log_probs() -> None:
    """The engine's log-probs are rounded to float32 first, as they arrive: the oracle reads what we read."""
    batch = []
    for one in positions(8, 4, sharpness=9.0):
        given = torch.tensor(one.engine, dtype=torch.float64).log().float().double().exp().tolist()
        batch.append(Position(one.logits, given, one.sampled, one.head))
    logits = logits_of(batch, torch.float64)
    found, term = surrogates(batch, weigh_by("truncate"), logits)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    wanted = torch.stack([center_oracle.gradient(one, weigh_of("truncate")) for one in batch]) / TEMPERATURE
    assert float((1 - term.behavior_mass).min()) < 1e-5
    assert largest_error(gradient[1:-1], wanted) < 1e-6


def test_the_top_of_the_vocabulary_comes_near_the_dense_term() -> None:
    """Each candidate more leaves less of the vocabulary to the tail's model."""
    errors = []
    for size in (1, 4, 8, VOCABULARY):
        batch = [Position(x.logits, x.engine, x.sampled, sorted(range(VOCABULARY), key=lambda v: -x.engine[v])[:size])
                 for x in positions(11, VOCABULARY, count=12)]  # fmt: skip
        logits = logits_of(batch, torch.float64)
        (gradient,) = torch.autograd.grad(surrogates(batch, weigh_by("truncate"), logits)[0].sum(), logits)
        dense = [center_oracle.gradient(x, weigh_of("truncate"), center_oracle.dense_surrogate) for x in batch]
        errors.append(float((gradient[1:-1] - torch.stack(dense) / TEMPERATURE).norm()))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-12


def test_positions_without_a_term_may_hold_anything() -> None:
    """A masked token's log-probs and logits may be NaN: its term and its gradient are 0, and its neighbours' stay."""
    batch = positions(31, 4)
    masked = torch.tensor([False, True, False, False, True, False])
    logits = logits_of(batch, torch.float64)
    known = candidates_of(batch, torch.float64)
    behavior = known.behavior.clone()
    behavior[1], behavior[4] = torch.nan, -torch.inf
    hidden = Candidates(known.rows, known.sampled, known.ids, behavior)
    target, weigh = torch.where(masked, torch.nan, target_of(batch, logits)), weigh_by("truncate")
    term = center(logits, target, ~masked, hidden, weigh, TEMPERATURE)
    plain = center(logits, target_of(batch, logits), all_of(batch), known, weigh, TEMPERATURE)
    assert torch.equal(term.log_probs[~masked], plain.log_probs[~masked]) and not term.log_probs[masked].any()
    used = torch.where(masked, 0, term.log_probs).sum()
    (gradient,) = torch.autograd.grad(used, logits)
    assert not gradient[[2, 5]].any() and gradient.isfinite().all()


def test_a_rank_without_a_token() -> None:
    logits = torch.zeros(3, VOCABULARY, requires_grad=True)
    nothing = candidates_of(positions(1, 4), torch.float32)[slice(0, 0)]
    term = center(logits, logits[:0].sum(-1), all_of([]), nothing, weigh_with(None))
    (term.log_probs.sum() + logits.sum()).backward()
    assert logits.grad is not None and term.log_probs.shape == (0,)
    assert torch.equal(logits.grad, torch.ones(3, VOCABULARY))


class Shard(torch.autograd.Function):
    """log softmax at the sampled token over tensor-parallel ranks: forward by the whole, backward to this shard."""

    @staticmethod
    def forward(ctx, shard: Tensor, everything: Tensor, sampled: Tensor, start: int) -> Tensor:
        log_p = everything.log_softmax(-1)
        hot = torch.nn.functional.one_hot(sampled, everything.shape[-1]) - log_p.exp()
        ctx.save_for_backward(hot[:, start : start + shard.shape[-1]])
        return log_p.gather(-1, sampled[:, None])[:, 0]

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.saved_tensors[0] * gradients[0][:, None], None, None, None


def test_two_ranks_score_a_half_of_the_vocabulary_each(tmp_path: Path) -> None:
    batch, half = positions(41, 4), VOCABULARY // 2
    logits, weigh = logits_of(batch, torch.float64), weigh_by("truncate")
    alone = center(
        logits, target_of(batch, logits), all_of(batch), candidates_of(batch, torch.float64), weigh, TEMPERATURE
    )
    (wanted,) = torch.autograd.grad(alone.log_probs.sum(), logits)

    def work(rank: int) -> tuple[Tensor, Tensor, int]:
        start = rank * half
        shard = logits.detach()[:, start : start + half].clone().requires_grad_()
        head = candidates_of(batch, torch.float64)
        target = Shard.apply(shard[1:-1] / TEMPERATURE, logits.detach()[1:-1] / TEMPERATURE, head.sampled, start)
        over_ranks, made = Vocabulary(start, dist.group.WORLD), []
        counted = tally(
            lambda: made.append(center(shard, target, all_of(batch), head, weigh, TEMPERATURE, over_ranks).log_probs)
        )
        (gradient,) = torch.autograd.grad(made[0].sum(), shard)
        return made[0].detach(), gradient, counted.collectives.total()

    ranks = run_ranks(2, 1, work, tmp_path, megatron=False)
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in ranks], -1), wanted, rtol=1e-12, atol=1e-15)
    for value, _, calls in ranks:
        torch.testing.assert_close(value, alone.log_probs.detach(), rtol=1e-12, atol=1e-15)
        assert calls == 1


def test_nothing_of_the_vocabularys_size_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak beyond logits and their gradient is below 2 x T x k x 4 bytes, in forward and backward."""
    tokens, vocabulary, k = 4096, 3000, 32
    monkeypatch.setattr(centering, "CHUNK", 2048)
    logits = torch.randn(tokens, vocabulary, requires_grad=True)
    top = logits.detach().log_softmax(-1).topk(k)
    sampled, every = top.indices[:, 3], torch.ones(tokens, dtype=torch.bool)
    head = Candidates(torch.arange(tokens), sampled, top.indices.int(), top.values)
    target = torch.log_softmax(logits, -1).gather(-1, sampled[:, None])[:, 0].detach()
    made: list[Any] = []
    forward = peak_bytes(lambda: made.append(center(logits, target, every, head, weigh_by("truncate"))))
    outputs, received = [made[0].log_probs, logits.view_as(logits)], [torch.ones(tokens), torch.zeros_like(logits)]
    backward = peak_bytes(lambda: made.extend(torch.autograd.grad(outputs, logits, received)))
    assert made[1].any() and max(forward, backward) < 2 * tokens * k * 4


def test_a_gradient_that_is_one_number_expanded_is_not_written_to() -> None:
    batch = positions(51, 4)
    logits = logits_of(batch, torch.float64)
    term = center(
        logits, target_of(batch, logits).detach(), all_of(batch), candidates_of(batch, torch.float64), weigh_with(None)
    )
    (term.log_probs.sum() + logits.sum()).backward()
    assert logits.grad is not None and logits.grad.is_contiguous()
