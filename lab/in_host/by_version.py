"""Weights of tokens whose version is known, in plain Python floats, from the log-probs that the host dumped.

Nothing of `mis_plugins` is imported: the module is the oracle for `behav_imp_weight/*` and for the loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.in_host.dumps import MicroBatch, Recorded

NEXT = "next"
BY_VERSION = (NEXT, "segment_wise", "standard", "fresh")
"""Losses of rows that know versions. `next` and `segment_wise` have segment-wise weights, with PPO's ratio
against pi_{v+1} or pi_V. `standard` has standard weights. `fresh` is for rows whose bound leaves no old
token."""
RECOMPUTED_FROM = 2
"""The age from which log pi_{v+1} must have been stored; at lower ages the trainer's own log-prob is used."""


@dataclass(frozen=True)
class Token:
    """A valid token: its age, and the logarithms of pi_{v+1} / pi_v and of pi_V / pi_v."""

    age: int
    to_next: float
    to_present: float


def numerator(row: Recorded, t: int, loss: str) -> float:
    """Return the log-prob that a token's weight compares with the engine's; NaN where it was not stored.

    With the loss `next`, PPO's ratio too compares the target policy with this log-prob.
    """
    assert row.age is not None and row.following is not None
    if loss == "standard" or row.age[t] < RECOMPUTED_FROM:
        return row.proximal[t]
    stored = row.following[t]
    return math.nan if stored is None else stored


def factors(row: Recorded, upper: float, loss: str) -> list[float]:
    """Return each token's weight."""
    return [min(math.exp(numerator(row, t, loss) - mu), upper) for t, mu in enumerate(row.behavior)]


def tokens(batches: Iterable[MicroBatch], loss: str) -> list[Token]:
    """List the valid tokens of a step."""
    return [
        Token(row.age[t], numerator(row, t, loss) - row.behavior[t], row.proximal[t] - row.behavior[t])
        for batch in batches
        for row in batch
        if row.age is not None
        for t, live in enumerate(row.mask)
        if live
    ]


def summary(batches: Sequence[MicroBatch], loss: str) -> dict[str, Any]:
    """Count a step's tokens by age, the sequences of several versions, and the tokens that cannot be weighed.

    `k3_next` and `k3_present` are the mean k3 to log pi_{v+1} and to log pi_V, of tokens that need a stored log-prob.
    `k3_near` is the mean k3 to log-probs of weights at most one update newer than a token's own, over all
    tokens with such a log-prob. `k3_fresh` is the mean k3 to log pi_V, over sequences that version V alone
    wrote.
    """
    found = tokens(batches, "segment_wise" if loss != "standard" else loss)
    ages = [token.age for token in found]
    rows = [row for batch in batches for row in batch if row.age is not None]
    old = [token for token in found if token.age >= RECOMPUTED_FROM]
    known = [token for token in old if not math.isnan(token.to_next)]
    near = [token for token in found if token.age < RECOMPUTED_FROM]
    fresh = tokens([[row for row in rows if set(_valid(row)) == {0}]], loss)
    return {
        "ages": {str(age): ages.count(age) for age in sorted(set(ages))},
        "mixed": sum(len(set(_valid(row))) > 1 for row in rows),
        "lacking": sum(math.isnan(token.to_next) for token in found),
        "k3_next": _k3(token.to_next for token in known),
        "k3_present": _k3(token.to_present for token in known),
        "k3_near": _k3(token.to_next for token in (near if loss == "standard" else near + known)),
        "k3_fresh": _k3(token.to_present for token in fresh),
    }


def _valid(row: Recorded) -> list[int]:
    assert row.age is not None
    return [age for age, live in zip(row.age, row.mask, strict=True) if live]


def _k3(logs: Iterable[float]) -> float | None:
    found = [math.expm1(x) - x for x in logs]
    return statistics.fmean(found) if found else None


def metrics(batches: Sequence[MicroBatch], upper: float, loss: str) -> dict[str, float]:
    """Compute the metrics of weights that the step must log, over all tokens and by age."""
    found = tokens(batches, loss)
    groups = {"": found} | {
        f"/age_{age}": [token for token in found if token.age == age] for age in {token.age for token in found}
    }
    return {f"{name}{end}": value for end, group in groups.items() for name, value in _of(group, upper, loss)}


def _of(group: Sequence[Token], upper: float, loss: str) -> Iterator[tuple[str, float]]:
    ratios = [math.exp(token.to_next) for token in group]
    weights = [min(ratio, upper) for ratio in ratios]
    yield "behav_imp_weight/avg", statistics.fmean(weights)
    yield "behav_imp_weight/std", statistics.pstdev(weights)
    yield "behav_imp_weight/min", min(weights)
    yield "behav_imp_weight/max", max(weights)
    yield "behav_imp_weight/ess", math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    if loss != "standard":
        yield "behav_imp_weight/var/segment_wise", statistics.pvariance(ratios)
    yield ("behav_imp_weight/var/standard", statistics.pvariance([math.exp(token.to_present) for token in group]))
    yield "behav_kl/avg", -statistics.fmean(token.to_next for token in group)
    yield "staleness/avg", statistics.fmean(token.age for token in group)
    yield "staleness/tokens", len(group)
    yield "staleness/unknown", 0


TIMES = {
    "recompute": "perf/mis_next_log_probs_time",
    "log_probs": "perf/log_probs_time",
    "training": "perf/actor_train_time",
    "step": "perf/step_time",
}


def times(perf: Mapping[str, float]) -> dict[str, float]:
    """Pick the seconds of one step that show what the recompute costs; not every step has a recompute."""
    return {name: perf[key] for name, key in TIMES.items() if key in perf}


HEAD = """
## What the recompute costs of a step

Medians over the steps that had one, of seconds that the host logged; a tiny model on a CPU, beside which the engine
ran. The recompute scores the tokens that the version before wrote, of all responses that run, wait or travel. Training
is the forward and backward pass and the optimizer.

| row | recompute | the host's own log-prob pass | training | recompute's share of the three |
|---|---|---|---|---|
"""


def section(records: Iterable[Mapping[str, Any]]) -> str:
    """Write a line of markdown for each record whose steps had a recompute; nothing where none had."""
    lines = [_cost(record["row"], found) for record in records if (found := _recomputed(record))]
    return HEAD + "".join(lines) if lines else ""


def _recomputed(record: Mapping[str, Any]) -> list[dict[str, float]]:
    times = (step.get("times", {}) for step in record["steps"])
    return [found for found in times if "recompute" in found]


def _cost(row: str, steps: Sequence[Mapping[str, float]]) -> str:
    names = ("recompute", "log_probs", "training")
    middle = [statistics.median(step[name] for step in steps) for name in names]
    share = statistics.median(step["recompute"] / math.fsum(step[name] for name in names) for step in steps)
    return f"| {row} | {' | '.join(f'{seconds:.2f} s' for seconds in middle)} | {share:.0%} |\n"
