"""The workload of a verification: requests that lead into the situations where a kernel could change bits."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch

from mis_plugins.shared.terminal import progress
from true_on_policy.contract.specs import Ability
from true_on_policy.engines.protocol import Request, Sample
from true_on_policy.verify.certificate import Evidence

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
        for batch in progress(self._batches(done), "batches sampled"):
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


MORE = "give more --tokens"
# The situations that not every engine can meet: the ability that the engine needs, and how a user meets the situation.
OF_ABLE: dict[str, tuple[Ability, str]] = {
    "prefix-cache hit": ("prefix cache", f"{MORE}, and leave the engine's prefix cache on"),
    "preemption": ("preemption", f"{MORE}: the engine preempts only after some decode steps of one batch"),
}


class Situations(NamedTuple):
    """Names of the situations that a verification met, could have met, and could never meet with its engine.

    not_met: what makes the workload meet a situation, by the situation's name.
    """

    met: tuple[str, ...]
    not_met: dict[str, str]
    not_of_engine: tuple[str, ...]


def situations(counts: Mapping[str, Any], abilities: Collection[Ability]) -> Situations:
    """Sort the situations of a verification by what `counted` has counted."""
    is_met: dict[str, bool] = {
        **{f"batch of {size}": counts["batches"][str(size)] > 0 for size in BATCH_SIZES},
        **{f"temperature {value:g}": value in counts["temperatures"] for value in sorted(set(TEMPERATURES))},
        f"sequence beyond {STOCK_KEYS} tokens": counts["longest_sequence"] > STOCK_KEYS,
        "continued sequence": counts["continued_sequences"] > 0,
        "weight update": counts["weight_updates"] > 0,
        "prefix-cache hit": counts["prompt_tokens_from_cache"] > 0,
        "preemption": counts["preemptions"] > 0,
    }
    foreign = [name for name, (ability, _) in OF_ABLE.items() if ability not in abilities]
    remedies = {name: OF_ABLE.get(name, ("", MORE))[1] for name in is_met if name not in foreign}
    not_met = {name: remedy for name, remedy in remedies.items() if not is_met[name]}
    met = [name for name in remedies if name not in not_met]
    return Situations(tuple(met), not_met, tuple(foreign))
