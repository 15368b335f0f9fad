"""The workload of a verification: requests that lead into the situations where a kernel could change bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from true_on_policy.contract.specs import Ability
from true_on_policy.engines.protocol import Request, Sample
from true_on_policy.verify.links import Evidence

BATCH_SIZES = (1, 3, 8)
LONGEST_RESPONSE = 80
LONGEST_PROMPT = 200
STOCK_KEYS = 512  # the number of keys that a stock kernel takes at once
LONG_PROMPT = STOCK_KEYS + 8
TEMPERATURES = (1.0, 1.0, 0.7)


@dataclass
class Workload:
    """Endless batches of ragged requests: sizes 1, 3 and 8, temperatures 1 and 0.7, and a prompt beyond 512 tokens.

    A full set ends with a batch that continues earlier sequences, so that an engine finds the prompts in its cache.

    Attributes:
        vocab: the number of tokens from which random prompts are drawn.
        prompts: real prompts, which replace random prompts; the long prompt joins several real prompts.
    """

    vocab: int
    seed: int
    prompts: Sequence[tuple[int, ...]] = ()

    def __post_init__(self):
        self._random = torch.Generator().manual_seed(self.seed)
        self._real = self._shuffled()
        self._number = 0
        self._full_sets = 0

    def sample(
        self, generate: Callable[[Sequence[Request]], list[Sample]], tokens: int, full_set: bool = False
    ) -> list[list[Sample]]:
        """Sample whole batches by `generate` until their samples hold at least `tokens` tokens.

        Args:
            full_set: whether to go on until this call or an earlier call has sampled a full set.
        """
        done: list[Sample] = []
        batches: list[list[Sample]] = []
        for batch in self._batches(done):
            batches.append(generate(batch))
            done += batches[-1]
            enough = sum(len(sample.tokens) for sample in done) >= tokens
            if enough and (self._full_sets or not full_set):
                return batches
        raise AssertionError("batches never end")

    def _batches(self, done: Sequence[Sample]) -> Iterator[list[Request]]:
        yield [self._request(self._long_prompt())]
        for size in cycle(BATCH_SIZES):
            yield [
                self._request(next(self._real) if self.prompts else self._drawn(self._length(LONGEST_PROMPT)))
                for _ in range(size)
            ]
            if size == max(BATCH_SIZES):
                self._full_sets += 1
                yield [self._request(sample.sequence) for sample in done[-3:]]

    def _request(self, prompt: tuple[int, ...]) -> Request:
        self._number += 1
        return Request(
            prompt=prompt,
            length=self._length(LONGEST_RESPONSE),
            seed=self._number,
            temperature=TEMPERATURES[self._number % len(TEMPERATURES)],
        )

    def _length(self, longest: int) -> int:
        return int(torch.randint(1, longest + 1, (), generator=self._random))

    def _long_prompt(self) -> tuple[int, ...]:
        if not self.prompts:
            return self._drawn(LONG_PROMPT)
        joined: tuple[int, ...] = ()
        while len(joined) < LONG_PROMPT:
            joined += next(self._real)
        return joined

    def _shuffled(self) -> Iterator[tuple[int, ...]]:
        """Yield the real prompts without end, in a new order each time around."""
        random = torch.Generator().manual_seed(self.seed)
        while True:
            for index in torch.randperm(len(self.prompts), generator=random).tolist():
                yield self.prompts[index]

    def _drawn(self, length: int) -> tuple[int, ...]:
        return tuple(torch.randint(self.vocab, (length,), generator=self._random).tolist())


def arrangements(samples: Sequence[Sample], seed: int) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the ways to batch the samples in a trainer, each with its name and the shuffled indices of each batch."""
    random = torch.Generator().manual_seed(seed)
    for name, size in (("in batches of 3", 3), ("in batches of 8", 8), ("all in one batch", len(samples))):
        order = torch.randperm(len(samples), generator=random).tolist()
        yield name, [order[start : start + size] for start in range(0, len(order), size)]


Counts = Mapping[str, Any]


@dataclass(frozen=True)
class Situation:
    """A situation is a circumstance that a verification must meet.

    Attributes:
        count: reads from `counted` how often the situation was met.
        needs: the ability that the engine needs; None where every engine can meet the situation.
        remedy: how a user meets the situation.
    """

    name: str
    count: Callable[[Counts], int]
    needs: Ability | None = None
    remedy: str = "give more --tokens"


SITUATIONS = (
    *(
        Situation(f"batch of {size}", lambda counts, size=size: counts["batches"][str(size)])
        for size in BATCH_SIZES
    ),
    *(
        Situation(f"temperature {value:g}", lambda counts, value=value: value in counts["temperatures"])
        for value in sorted(set(TEMPERATURES))
    ),
    Situation(f"sequence beyond {STOCK_KEYS} tokens", lambda counts: counts["longest_sequence"] > STOCK_KEYS),
    Situation("continued sequence", lambda counts: counts["continued_sequences"]),
    Situation("weight update", lambda counts: counts["weight_updates"]),
    Situation(
        "prefix-cache hit",
        lambda counts: counts["prompt_tokens_from_cache"],
        "prefix cache",
        "give more --tokens, and leave the engine's prefix cache on",
    ),
    Situation(
        "preemption",
        lambda counts: counts["preemptions"],
        "preemption",
        "give more --tokens: the engine preempts only after some decode steps of one batch",
    ),
)


def counted(evidence: Evidence) -> dict[str, Any]:
    """Count how often the engine met each circumstance while it sampled."""
    samples = evidence.samples
    sequences = {sample.sequence for sample in samples}
    sizes = Counter(evidence.batches)
    return {
        "sampled_tokens": evidence.tokens,
        "sequences": len(samples),
        "longest_sequence": max(len(sample.sequence) for sample in samples),
        "temperatures": sorted({sample.request.temperature for sample in samples}),
        "batches": {str(size): sizes[size] for size in sorted({*BATCH_SIZES, *sizes})},
        "continued_sequences": sum(sample.request.prompt in sequences for sample in samples),
        "weight_updates": len({sample.version for sample in samples}) - 1,
        "prompt_tokens_from_cache": sum(sample.cached for sample in samples),
        "preemptions": sum(sample.preempted for sample in samples),
    }


def not_met(counts: Counts, abilities: Collection[Ability]) -> dict[str, str]:
    """Name the situations that the engine could meet and did not, each with its remedy."""
    return {one.name: one.remedy for one in _possible(abilities) if not one.count(counts)}


def met(counts: Counts, abilities: Collection[Ability]) -> list[str]:
    """Name the situations that were met."""
    return [one.name for one in _possible(abilities) if one.count(counts)]


def not_of_engine(abilities: Collection[Ability]) -> list[str]:
    """Name the situations that this engine cannot meet, or does not report."""
    possible = _possible(abilities)
    return [one.name for one in SITUATIONS if one not in possible]


def _possible(abilities: Collection[Ability]) -> list[Situation]:
    return [one for one in SITUATIONS if one.needs is None or one.needs in abilities]
