"""An arm over its seeds: how soon it learns, where it ends, and how far that is from the arm of plain bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from provenance import markdown_table

from real_model.arms import ARMS
from real_model.records import Record

PLAIN = "bf16"
LAST = 10  # rollouts that are averaged for the end of a run

SUMMARY = """## Arms

Means over the seeds, in brackets the seed with the least and the one with the most. Course: the mean held-out accuracy
of all evaluations after the first step, which tells how soon an arm learns. Less bf16's: the course less that of the
arm `bf16` with an equal seed, hence of equal problems and equal random numbers. Reward: of all rollouts. Ppl at the
end: the trainer's perplexity of the last {last} rollouts; 1 is a policy without any choice left.
"""
HEADS = (
    "arm",
    "seeds",
    "accuracy at the end",
    "course",
    "less bf16's",
    "reward",
    "largest k3",
    "ppl at the end",
    "kept",
)


def summary(there: Mapping[tuple[str, int], Record]) -> Iterator[str]:
    """The lines of a table with a row for each arm."""
    yield SUMMARY.format(last=LAST)
    names = dict.fromkeys(name for name, _ in there)
    yield markdown_table(HEADS, [_row(name, there) for name in names])


def course(record: Record) -> float:
    """The mean held-out accuracy after the first step."""
    return fmean(one["accuracy"] for one in record["held_out"][1:])


def _row(name: str, there: Mapping[tuple[str, int], Record]) -> list[str]:
    found = {seed: record for (one, seed), record in there.items() if one == name}
    plain = {seed: there[PLAIN, seed] for seed in found if (PLAIN, seed) in there}
    less = [course(found[seed]) - course(record) for seed, record in plain.items()]
    courses = [course(record) for record in found.values()]
    ends = [record["held_out"][-1]["accuracy"] for record in found.values()]
    rewards, kept = (
        [fmean(row[key] for row in record["rollouts"]) for record in found.values()]
        for key in ("reward", "kept")
    )
    sharp = [fmean(row["trainer_ppl"] for row in record["rollouts"][-LAST:]) for record in found.values()]
    largest = max(row["k3"] for record in found.values() for row in record["rollouts"])
    told = [_spread(values) for values in (ends, courses)]
    against = "-" if name == PLAIN else _spread(less, "+.2f")
    return [
        ARMS[name].words,
        str(len(found)),
        *told,
        against,
        _spread(rewards),
        f"{largest:.1e}",
        _spread(sharp),
        _spread(kept),
    ]


def _spread(values: Sequence[float], spec: str = ".2f") -> str:
    if not values:
        return "-"
    middle, low, high = (format(one, spec) for one in (fmean(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} [{low}, {high}]"
