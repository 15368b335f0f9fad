"""Does correction help a real model? GRPO on SmolLM2-135M-Instruct, with rollouts by rounded weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from lab.provenance import markdown_table

Record = Mapping[str, Any]
Units = Mapping[tuple[str, int], Record]
"""The record of each arm with each seed."""

NORMAL = 1.96  # standard errors on either side of a 95% interval
PLAIN = "bf16"
LAST = 10  # rollouts that are averaged for the end of a run

WORDS = {
    "on-policy": "truly on policy",
    PLAIN: "bf16, none (dense 1)",
    "int5-none": "int5, none",
    "fp8-none": "fp8, none",
    **{
        f"{rung}-{name}": f"{rung}, {words}"
        for rung in ("int5", "fp8")
        for name, words in {"tis": "token TIS", "sequence": "sequence", "geometric": "geometric"}.items()
    },
    **{f"bf16-dense-{number}": f"bf16, dense {number}" for number in (2, 3, 4)},
}
"""Each arm in words, the most informative first. Configuration 1 of the blog corrects nothing and is the arm `bf16`."""

HEAD = """# Does correction help a real model?

Drawn by `python -m lab.toys real_model_rl` from the {units} units that ran, an arm with a seed each.

GRPO on {model}: the sum of two digits, rewarded where the last number of the answer is right. A rollout is {prompts}
prompts with {samples} responses of up to {length} tokens at temperature 1, and makes one step of AdamW (learning rate
{lr:g}). Sampled by Hugging Face transformers in bf16 with a key-value cache, with weights rounded as the arm says.
Trainer: Hugging Face transformers in bf16 with float32 master weights, one pass over the whole sequence. *Truly on
policy* samples by the trainer's own pass. The pack's hook corrects; the embedded host's policy loss calls it. The
window of `geometric` keeps nine of ten sequences of a rollout before training.

How the recipe was found: [real_model_rl-search.md](real_model_rl-search.md).
"""


def markdown(content: Mapping[str, Record]) -> str:
    """Return the page of the records."""
    order = list(WORDS)
    there = {(one["settings"]["arm"], one["settings"]["seed"]): one for one in content.values()}
    there = dict(sorted(there.items(), key=lambda item: (item[0][1], order.index(item[0][0]))))
    head = HEAD.format(units=len(there), **next(iter(there.values()))["settings"])
    return "\n".join(
        [head, *summary(there), *_runs(there), *_directions(there), *averaged(there), *_made(there)]
    )


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


def summary(there: Units) -> Iterator[str]:
    """The lines of a table with a row for each arm."""
    yield SUMMARY.format(last=LAST)
    names = dict.fromkeys(name for name, _ in there)
    yield markdown_table(HEADS, [_arm(name, there) for name in names])


def _arm(name: str, there: Units) -> list[str]:
    found = {seed: record for (one, seed), record in there.items() if one == name}
    spreads = [_spread([*map(measure, found.values())]) for measure in MEASURES.values()]
    largest = max(row["k3"] for record in found.values() for row in record["rollouts"])
    return [WORDS[name], str(len(found)), *spreads, _against_plain(name, found, there), f"{largest:.1e}"]


def _against_plain(name: str, found: Mapping[int, Record], there: Units) -> str:
    plain = {seed: there[PLAIN, seed] for seed in found if (PLAIN, seed) in there}
    less = [course(found[seed]) - course(record) for seed, record in plain.items()]
    return _spread([] if name == PLAIN else less, "+.2f")


def _spread(values: Sequence[float], spec: str = ".2f") -> str:
    if not values:
        return "-"
    middle, low, high = (format(one, spec) for one in (fmean(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} [{low}, {high}]"


RUNS = f"""## Runs

Accuracy and format: of the trainer's policy on held-out sums, before the first step and after the last one; the format
is the share of answers with a number. Reward, k3 a token and the perplexities of trainer and rollout: means over the
first and the last {LAST} rollouts.
"""

DIRECTIONS = """## Direction of the gradient

Cosines over the last {layers} layers, of {direction_prompts} prompts x {direction_samples} responses a set. The
on-policy gradient is the mean of two halves. The trainer's weights sample both with a cache, and each response weighs
as much as its whole, unbounded ratio, so that the cache leaves no bias but in GRPO's mean and deviation of a group.
A gradient is added up prompt by prompt: an arm that normalizes over its micro-batch does so over one prompt.
Agreement: of the two halves, which is what sampling noise leaves of 1. Uncorrected: the arm's samples without its
correction. In brackets: 95% of a jackknife over prompts, whose error is carried over to Fisher's `atanh` of the cosine
and back, so that no interval passes 1.
"""


def _runs(there: Units) -> Iterator[str]:
    yield RUNS
    heads = (
        "arm",
        "seed",
        "accuracy",
        "format",
        "reward",
        "k3",
        "ppl, trainer",
        "ppl, rollout",
        "kept",
        "tokens with equal bits",
    )
    yield markdown_table(heads, [_row(name, seed, record) for (name, seed), record in there.items()])


def _row(name: str, seed: int, record: Record) -> list[str]:
    rows, held = record["rollouts"], record["held_out"]
    accuracy, formatted = (f"{held[0][key]:.2f} → {held[-1][key]:.2f}" for key in ("accuracy", "format"))
    rewards, k3, trainer, rollout = (
        " → ".join(format(fmean(row[key] for row in part), spec) for part in (rows[:LAST], rows[-LAST:]))
        for key, spec in (("reward", ".2f"), ("k3", ".1e"), ("trainer_ppl", ".2f"), ("rollout_ppl", ".2f"))
    )
    kept = f"{fmean(row['kept'] for row in rows):.2f}"
    equal = f"{sum(row['equal'] for row in rows)} of {sum(row['tokens'] for row in rows)}"
    return [WORDS[name], str(seed), accuracy, formatted, rewards, k3, trainer, rollout, kept, equal]


def _directions(there: Units) -> Iterator[str]:
    yield DIRECTIONS.format(**next(iter(there.values()))["settings"])
    rows = [
        (
            WORDS[name],
            seed,
            one["rollout"],
            *(interval(one[key]) for key in ("agreement", "arm", "uncorrected")),
        )
        for (name, seed), record in there.items()
        for one in record["directions"]
    ]
    yield markdown_table(("arm", "seed", "rollout", "agreement", "arm", "uncorrected"), rows)


AVERAGED = f"""
The means of these cosines over the seeds and the rollouts where all three are there, with {NORMAL} standard errors
on either side, as if all directions were independent.
Gained: a correction's cosine less that of the same samples uncorrected, whose noise is shared.
"""


def averaged(there: Units) -> Iterator[str]:
    """The lines of the table of averaged cosines."""
    yield AVERAGED
    rows = []
    for name in dict.fromkeys(name for name, _ in there):
        courses = [record["directions"] for (one, _), record in there.items() if one == name]
        found = [
            [one[key][0] for key in ("agreement", "arm", "uncorrected")]
            for course in courses
            for one in course
            if None not in one.values()
        ]
        if found:
            columns = [*zip(*found, strict=True), [arm - plain for _, arm, plain in found]]
            rows.append((WORDS[name], len(found), *map(mean_with_error, columns)))
    yield markdown_table(("arm", "directions", "agreement", "arm", "uncorrected", "gained"), rows)


def mean_with_error(values: Sequence[float]) -> str:
    """The mean of several values, with NORMAL standard errors on either side."""
    middle = fmean(values)
    if len(values) == 1:
        return f"{middle:.2f}"
    error = NORMAL * stdev(values) / math.sqrt(len(values))
    return f"{middle:.2f} [{middle - error:.2f}, {middle + error:.2f}]"


def interval(value: Sequence[float] | None) -> str:
    """A cosine with its interval, symmetric in the cosine's `atanh`; the records hold it symmetric in the cosine."""
    if value is None:
        return "-"
    middle, _, high = value
    if abs(middle) >= 1:
        return f"{middle:.2f}"
    half = (high - middle) / (1 - middle**2)  # the derivative of atanh
    low, high = (math.tanh(math.atanh(middle) + part) for part in (-half, half))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _made(there: Units) -> Iterator[str]:
    yield "## Windows and records\n"
    rows = []
    for (name, seed), record in there.items():
        rules = ((record["correction"] or {}).get("mis") or {}).get("reject") or []
        bounds = "; ".join(f"[{rule['lower']:.3f}, {rule['upper']:.3f}]" for rule in rules) or "-"
        made = record["measured_with"]
        rows.append(
            (
                WORDS[name],
                seed,
                bounds,
                f"{record['cpu_seconds'] / 60:.0f}",
                made["mis-plugins commit"],
                made["cpu"],
            )
        )
    yield markdown_table(("arm", "seed", "window", "CPU minutes", "commit", "machine"), rows)
