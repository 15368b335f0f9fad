"""The situations in which a kernel could compute other bits, and which of them a verification met.

A situation is counted from the engine's samples (versions, cached tokens, preemptions) and from the number of requests
in each call of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from true_on_policy.contract.specs import Ability
from true_on_policy.verify.links import Evidence
from true_on_policy.verify.workload import BATCH_SIZES, STOCK_KEYS, TEMPERATURES

Counts = Mapping[str, Any]


@dataclass(frozen=True)
class Situation:
    """A situation is a circumstance that a verification must meet.

    Attributes:
        name: the name of the situation in words.
        count: reads from `counted` how often the situation was met.
        needs: the ability that the engine needs; None where every engine can meet the situation.
        remedy: how a user meets the situation.
    """

    name: str
    count: Callable[[Counts], int]
    needs: Ability | None = None
    remedy: str = "give more --tokens"


def _batch_of(size: int) -> Situation:
    return Situation(f"batch of {size}", lambda counts: counts["batches"][str(size)])


def _temperature(value: float) -> Situation:
    return Situation(f"temperature {value:g}", lambda counts: value in counts["temperatures"])


SITUATIONS = (
    *map(_batch_of, BATCH_SIZES),
    *map(_temperature, sorted(set(TEMPERATURES))),
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
