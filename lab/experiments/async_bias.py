"""Measure how staleness turns the gradient, and how far importance weights turn the gradient back.

In an asynchronous run each version sees one rollout, and a gradient is nearly all noise. Here many rollouts are sampled
instead, while the weights move through the versions of a synchronous run at fixed tokens. All rollouts are compared
with on-policy samples of the last version.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from lab.host.asynchronous.pool import Pool, recompute
from lab.host.asynchronous.response import Response
from lab.host.asynchronous.scoring import Scoring
from lab.host.asynchronous.source import samples_of
from lab.host.loop import Loop
from lab.host.model.decoding import Sampling, Unfinished
from lab.host.model.engine import DecodeEngine
from lab.host.rollout.sampler import Rollout, draw, judged
from lab.host.train.gradients import cosine, mean_gradient, on_policy, on_policy_reference

Weights = Mapping[str, Tensor]
BURN_IN = 8
"""Rollouts before the first version that is kept: Adam's first steps are larger than its later steps."""


@dataclass(frozen=True)
class Stale:
    """Rollouts that several versions wrote, and the on-policy gradient of the last version.

    Attributes:
        versions: the weights of each version.
        reference: the on-policy gradient.
        again: a second on-policy gradient of equal size, compared with `reference`.
    """

    versions: list[Weights]
    rollouts: list[Rollout]
    reference: Tensor
    again: dict[str, float]

    @classmethod
    def collect(cls, loop: Loop, bound: int, rollouts: int) -> Stale:
        versions = moved(loop, bound + 1)
        fresh = DecodeEngine(loop.reference.config, "fp32")
        fresh.update_weights(versions[-1], bound)
        names = ("first", "second", "third")
        first, second, third = ([loop.collect(fresh, name, i) for i in range(rollouts)] for name in names)
        reference = on_policy_reference(loop.args, loop.state, loop.trainer, (first, second)).mean
        stale = [stale_rollout(loop, versions, index) for index in range(rollouts)]
        return cls(versions, stale, reference, direction(loop, on_policy(loop.args), third, reference))


def moved(loop: Loop, count: int) -> list[Weights]:
    """Collect the weights of `count` successive versions; the last weights are the trainer's own."""
    for _ in range(BURN_IN):
        loop.one_rollout()
    kept: list[Weights] = [loop.trainer.weights()]
    while len(kept) < count:
        loop.one_rollout()
        kept.append(loop.trainer.weights())
    return kept


def stale_rollout(loop: Loop, versions: Sequence[Weights], index: int) -> Rollout:
    """Sample a rollout whose sequences the versions write in turn, in equal parts, and recompute it."""
    args, task = loop.args, loop.task
    problems, seeds = draw(args, task, (args.seed, "stale", index), {one.prompt for one in loop.held_out})
    pool = Pool()
    numbers = [pool.add(Response(problem.prompt)) for problem in problems]
    _decode(loop, versions, pool, dict(zip(numbers, seeds, strict=True)))
    score = Scoring(loop.trainer, loop.state)
    for version in range(1, len(versions) - 1):
        with loop.trainer.holding(versions[version]):
            recompute(pool, version, 1 << 20, score)
    responses = [response for number in numbers if (response := pool.take(number)) is not None]
    samples = samples_of(task, problems, responses, args.n_samples_per_prompt)
    return judged(args, samples, len(versions) - 1)


def _decode(loop: Loop, versions: Sequence[Weights], pool: Pool, seeds: Mapping[int, int]) -> None:
    """Draw every response: of V versions, version floor(t V / T) draws token t of T."""
    args, length = loop.args, loop.task.max_response
    engine = DecodeEngine(loop.reference.config, args.rollout_weights)
    engine.update_weights(versions[0], 0)
    known = pool.snapshot()
    begun = [Unfinished(number, known[number].prompt, (), seed) for number, seed in seeds.items()]
    decoding = engine.begin(begun, Sampling(length, args.rollout_temperature, loop.task.eos))
    for step in range(length):
        version = step * len(versions) // length
        if version != engine.version:
            engine.update_weights(versions[version], version)
            decoding = decoding.go_on(engine.decoder, keep_cache=False)
        drawn = decoding.step()
        for number, token, log_prob in zip(drawn.numbers, drawn.tokens, drawn.log_probs, strict=True):
            pool.update(number, lambda now, t=token, x=log_prob, v=version: now.append([t], [x], v))
        if decoding.ended:
            return


def direction(
    loop: Loop, args: Namespace, rollouts: Sequence[Rollout], reference: Tensor
) -> dict[str, float]:
    """Compare the gradient of rollouts with the on-policy one.

    `pooled` is the cosine of the gradient over all rollouts, which shows bias. `single` is the mean cosine of one
    rollout's gradient, where variance counts too. `norm` is the gradient's norm over the on-policy gradient's.
    """
    gradients = [mean_gradient(args, loop.state, loop.trainer, [rollout]) for rollout in rollouts]
    pooled = torch.stack(gradients).mean(0)
    return {
        "pooled": cosine(pooled, reference),
        "single": fmean(cosine(one, reference) for one in gradients),
        "norm": float(pooled.norm() / reference.norm()),
    }
