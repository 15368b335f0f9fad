"""An arm over its seeds: how soon it learns, where it ends, and how far that is from the arm of plain bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean

from lab.provenance import markdown_table
from lab.real_model.arms import ARMS
from lab.real_model.records import Record

PLAIN = "bf16"
LAST = 10  # rollouts that are averaged for the end of a run

SUMMARY = """## Arms

Means over the seeds, in brackets the seed with the least and the one with the most. Course: the mean held-out accuracy
of all evaluations after the first step, which tells how soon an arm learns. Less bf16's: the course less that of the
arm `bf16` with an equal seed, hence of equal problems and equal random numbers. Reward: of all rollouts. Ppl at the
end: the trainer's perplexity of the last {last} rollouts; 1 is a policy without any choice left.
"""


def course(record: Record) -> float:
    """The mean held-out accuracy after the first step."""
    return fmean(one["accuracy"] for one in record["held_out"][1:])


def _mean(key: str, rollouts: slice = slice(None)) -> Callable[[Record], float]:
    return lambda record: fmean(row[key] for row in record["rollouts"][rollouts])


MEASURES: dict[str, Callable[[Record], float]] = {
    "accuracy at the end": lambda record: record["held_out"][-1]["accuracy"],
    "course": course,
    "reward": _mean("reward"),
    "ppl at the end": _mean("trainer_ppl", slice(-LAST, None)),
    "kept": _mean("kept"),
}
"""The columns that spread over the seeds, and how each number is computed from the record of a unit."""
HEADS = ("arm", "seeds", *MEASURES, "less bf16's", "largest k3")


def summary(there: Mapping[tuple[str, int], Record]) -> Iterator[str]:
    """The lines of a table with a row for each arm."""
    yield SUMMARY.format(last=LAST)
    names = dict.fromkeys(name for name, _ in there)
    yield markdown_table(HEADS, [_row(name, there) for name in names])


def _row(name: str, there: Mapping[tuple[str, int], Record]) -> list[str]:
    found = {seed: record for (one, seed), record in there.items() if one == name}
    spreads = [_spread([*map(measure, found.values())]) for measure in MEASURES.values()]
    largest = max(row["k3"] for record in found.values() for row in record["rollouts"])
    return [ARMS[name].words, str(len(found)), *spreads, _against_plain(name, found, there), f"{largest:.1e}"]


def _against_plain(name: str, found: Mapping[int, Record], there: Mapping[tuple[str, int], Record]) -> str:
    plain = {seed: there[PLAIN, seed] for seed in found if (PLAIN, seed) in there}
    less = [course(found[seed]) - course(record) for seed, record in plain.items()]
    return _spread([] if name == PLAIN else less, "+.2f")


def _spread(values: Sequence[float], spec: str = ".2f") -> str:
    if not values:
        return "-"
    middle, low, high = (format(one, spec) for one in (fmean(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} [{low}, {high}]"
