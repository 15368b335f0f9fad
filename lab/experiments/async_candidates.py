"""Candidates for the weights of stale tokens, and how far each turns the gradient back that staleness has turned.

In an asynchronous run each version sees one rollout, and a gradient is nearly all noise. Here many rollouts are sampled
instead, while the weights move through the versions of a synchronous run at fixed tokens. All rollouts are compared
with on-policy samples of the last version.

For a token that version v wrote, with the trainer at version V and the clip range [1 - e, 1 + e] of PPO:

    standard          bound(pi_V / pi_v)
    segment-wise      bound(pi_{v+1} / pi_v)
    clip against next bound(pi_{v+1} / pi_v) clip(pi_V / pi_{v+1}): the surrogate's gradient where pi_theta is pi_V and
                      its ratio is pi_theta / pi_{v+1}, which is 0 where the clip holds the token back
    product           prod_{u=v}^{V-1} bound(pi_{u+1} / pi_u)
    widened           bound(pi_V / pi_v) with a bound c^{V - v}; `root` has c^sqrt(V - v), as a random walk spreads

A bound is min(r, c), and at least 1 / c where `floored`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from lab.host.train.gradients import cosine, mean_gradient, on_policy

Weights = Mapping[str, Tensor]
BURN_IN = 8
"""Rollouts before the first version that is kept: Adam's first steps are larger than its later steps."""


@dataclass(frozen=True)
class Stale:
    """Rollouts that several versions wrote, and the on-policy gradient of the last version.

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
        estimates = [mean_gradient(on_policy(loop.args), loop.state, loop.trainer, one) for one in (first, second)]
        reference = (estimates[0] + estimates[1]) / 2
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


def direction(loop: Loop, args: Namespace, rollouts: Sequence[Rollout], reference: Tensor) -> dict[str, float]:
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


@dataclass(frozen=True)
class Tokens:
    """All tokens of a rollout, one entry each.

    behavior: the log-prob under the engine when the token was drawn.
    under: log-probs under the trainer, with one row for each version.
    wrote: the version that wrote the token.
    advantages: the advantage of each token, whose sign says where the clip holds the token back.
    """

    behavior: Tensor
    under: Tensor
    wrote: Tensor
    advantages: Tensor

    @property
    def age(self) -> Tensor:
        return len(self.under) - 1 - self.wrote

    def log_ratio(self, steps: int | None) -> Tensor:
        """Return log pi_{min(v + steps, V)} - log pi_v of each token, or log pi_V - log pi_v for None."""
        last = len(self.under) - 1
        to = torch.full_like(self.wrote, last) if steps is None else (self.wrote + steps).clamp(max=last)
        return self.under.gather(0, to[None])[0] - self.behavior


Log = Callable[[Tokens], Tensor]
EPS = 0.2


def standard(x: Tokens, cap: float = torch.inf) -> Tensor:
    return x.log_ratio(None).clamp(max=torch.tensor(cap).log().item())


def segment_wise(x: Tokens, cap: float) -> Tensor:
    return x.log_ratio(1).clamp(max=torch.tensor(cap).log().item())


def clip_against_next(x: Tokens, cap: float) -> Tensor:
    rest = x.log_ratio(None) - x.log_ratio(1)
    ratio = rest.exp()
    held = torch.where(x.advantages > 0, ratio > 1 + EPS, (ratio < 1 - EPS) & (x.advantages < 0))
    return torch.where(held, -torch.inf, segment_wise(x, cap) + rest)


def product(x: Tokens, cap: float, floored: bool = False) -> Tensor:
    """Multiply bounded ratios of neighbouring versions; the first ratio is against the engine's log-prob."""
    high = torch.tensor(cap).log().item()
    low = -high if floored else -torch.inf
    total = x.log_ratio(1).clamp(low, high)
    last = len(x.under) - 1
    for version in range(1, last):
        step = (x.under[version + 1] - x.under[version]).clamp(low, high)
        total = total + torch.where(x.wrote < version, step, 0)
    return total


def widened(x: Tokens, cap: float, root: bool = False, floored: bool = False) -> Tensor:
    spread = x.age.sqrt() if root else x.age.clamp(min=1)
    high = torch.tensor(cap).log() * (spread.clamp(min=1) if root else spread)
    low = -high if floored else torch.full_like(high, -torch.inf)
    return x.log_ratio(None).clamp(low, high)


CANDIDATES: Mapping[str, Log] = {
    "no weights": lambda x: torch.zeros_like(x.behavior),
    "standard, no bound": standard,
    "standard 5": partial(standard, cap=5.0),
    "standard 2": partial(standard, cap=2.0),
    "standard 1.5": partial(standard, cap=1.5),
    "segment-wise 5": partial(segment_wise, cap=5.0),
    "clip against next 5": partial(clip_against_next, cap=5.0),
    "product 5": partial(product, cap=5.0),
    "product 2": partial(product, cap=2.0),
    "product 1.5": partial(product, cap=1.5),
    "product 1.25": partial(product, cap=1.25),
    "product 1.5, floored": partial(product, cap=1.5, floored=True),
    "widened 2": partial(widened, cap=2.0),
    "widened 1.5": partial(widened, cap=1.5),
    "widened 1.25": partial(widened, cap=1.25),
    "root 2": partial(widened, cap=2.0, root=True),
    "root 1.5": partial(widened, cap=1.5, root=True),
}
"""The function for the logarithm of each weight; the number in a name is its bound c."""


def compared(loop: Loop, weighed: Namespace, bound: int, rollouts: int) -> dict[str, dict[str, float]]:
    """Compare the gradient under each candidate with the on-policy gradient, by `direction`.

    Args:
        weighed: arguments whose loss multiplies by exp(recomputed_log_probs - rollout_log_probs), unbounded.
    """
    made = Stale.collect(loop, bound, rollouts)
    tokens = [tokens_of(loop, made.versions, rollout) for rollout in made.rollouts]
    found = {"on-policy": made.again}
    for name, log_weight in CANDIDATES.items():
        logs = [log_weight(one) for one in tokens]
        for rollout, log in zip(made.rollouts, logs, strict=True):
            carry(rollout, log)
        weight = torch.cat(logs).exp()
        found[name] = direction(loop, weighed, made.rollouts, made.reference) | {
            "mean": float(weight.mean()),
            "variance": float(weight.var()),
        }
    return found


def tokens_of(loop: Loop, versions: Sequence[Weights], rollout: Rollout) -> Tokens:
    """Score a rollout by every version. The advantage is the reward's distance from its group's mean."""
    samples = rollout.samples
    data = {
        "tokens": [torch.tensor(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
    }
    under = []
    for weights in versions:
        with loop.trainer.holding(weights):
            under.append(torch.cat(loop.trainer.log_probs(data, micro_batch_size=len(samples))))
    groups: dict[int, list[float]] = {}
    for s in samples:
        groups.setdefault(s.group_index, []).append(s.reward)
    means = {number: sum(rewards) / len(rewards) for number, rewards in groups.items()}
    return Tokens(
        behavior=torch.cat([torch.tensor(s.rollout_log_probs) for s in samples]),
        under=torch.stack(under),
        wrote=torch.cat([torch.tensor(s.output_versions) for s in samples]),
        advantages=torch.cat([torch.full((s.response_length,), s.reward - means[s.group_index]) for s in samples]),
    )


def carry(rollout: Rollout, log_weight: Tensor) -> None:
    """Make a loss with `weight_cap: null` apply these weights: mark all tokens as written by version 0."""
    at = 0
    for sample in rollout.samples:
        length = sample.response_length
        assert sample.rollout_log_probs is not None
        own = log_weight[at : at + length].tolist()
        sample.recomputed_log_probs = [x + w for x, w in zip(sample.rollout_log_probs, own, strict=True)]
        sample.output_versions = [0] * length
        at += length
