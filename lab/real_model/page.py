"""The page of the experiment, made of the records that are there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev

from lab.provenance import markdown_table
from lab.real_model.arms import ARMS
from lab.real_model.directions import NORMAL
from lab.real_model.records import Record
from lab.real_model.summary import LAST, summary

Units = Mapping[tuple[str, int], Record]

HEAD = """# Does correction help a real model?

Made by `python -m lab.real_model_rl`, which goes on with what is missing.

GRPO on {model}: the sum of two digits, rewarded where the last number of the answer is right. A rollout is {prompts}
prompts with {samples} responses of up to {length} tokens at temperature 1, and makes one step of AdamW (learning rate
{lr:g}). Sampled by Hugging Face transformers in bf16 with a key-value cache, with weights rounded as the arm says.
Trainer: Hugging Face transformers in bf16 with float32 master weights, one pass over the whole sequence. *Truly on
policy* samples by the trainer's own pass. The pack's hook corrects; the embedded host's policy loss calls it. The
window of `geometric` keeps nine of ten sequences of a rollout before training.

How the recipe was found: [real_model_rl-search.md](real_model_rl-search.md).
"""


EMPTY = """# Does correction help a real model?

No unit of `python -m lab.real_model_rl` has finished yet: there is no answer so far. The command runs the arms
and writes this page. How its recipe was found: [real_model_rl-search.md](real_model_rl-search.md).
"""


def page(there: Units, missing: Sequence[tuple[str, int]]) -> str:
    """The page: what is there, in tables, and what is missing."""
    if not there:
        return EMPTY
    settings = next(iter(there.values()))["settings"]
    return "\n".join(
        [
            HEAD.format(**settings),
            *_missing(there, missing),
            *summary(there),
            *_runs(there),
            *_directions(there),
            *averaged(there),
            *_made(there),
        ]
    )


def _missing(there: Units, missing: Sequence[tuple[str, int]]) -> Iterator[str]:
    yield f"**{len(there)} of {len(there) + len(missing)} units have finished.**"
    if missing:
        seeds: dict[str, list[str]] = {}
        for name, seed in missing:
            seeds.setdefault(name, []).append(str(seed))
        told = "; ".join(f"{name} (seed {', '.join(numbers)})" for name, numbers in seeds.items())
        yield f"Missing: {told}. No arm can be ranked by one seed."
    yield ""


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
    return [ARMS[name].words, str(seed), accuracy, formatted, rewards, k3, trainer, rollout, kept, equal]


def _directions(there: Units) -> Iterator[str]:
    yield DIRECTIONS.format(**next(iter(there.values()))["settings"])
    rows = [
        (ARMS[name].words, seed, one["rollout"], *(interval(one[key]) for key in ("agreement", "arm", "uncorrected")))
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
            rows.append((ARMS[name].words, len(found), *map(mean_with_error, columns)))
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
                ARMS[name].words,
                seed,
                bounds,
                f"{record['cpu_seconds'] / 60:.0f}",
                made["mis-plugins commit"],
                made["cpu"],
            )
        )
    yield markdown_table(("arm", "seed", "window", "CPU minutes", "commit", "machine"), rows)
