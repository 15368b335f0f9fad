"""The results of the asynchrony experiment as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lab.provenance import as_markdown, markdown_table
from lab.toys.async_picture import draw

__all__ = ["draw", "markdown"]

HEAD = """\
# Segment-wise against standard decoupled PPO

Drawn by `python -m lab.toys async`: a Megatron-core policy reverses digits on CPU while a worker process samples;
seeds {seeds}. Not run on a GPU. Entries are means over the seeds, smallest and largest in brackets.

    {recipe}
"""

VARIANCE = """\
## Variance of the weights, by age

Of pi_{v+1} / pi_v (segment-wise) and of pi_V / pi_v (standard), before any bound, over the same tokens of one run. Age
is V - v, in updates. At age 1 both are the same by definition; at age 0 either holds the engine's rounding alone. That
of a run is the mean of the variances within its rollouts, by their tokens: not the variance of all its tokens together.
"""

BIAS = """\
## Direction of the gradient

Cosine to the on-policy gradient, of samples whose tokens eight earlier versions and the present one wrote in turn.
`pooled`: of the mean over {rollouts} rollouts, which shows bias; `single`: the mean of each rollout's own, where
variance counts too. `norm`: of the pooled gradient, over that of the on-policy one. `on-policy`: another on-policy
gradient of the same size, that is, what sampling noise leaves of 1.
"""

REWARDS = """\
## Reward on held-out prompts

Of the trainer's policy at the last evaluation, after about as many tokens trained on (the picture has the tokens). 256
prompts, sampled: standard error up to 0.03 a run. `start` is the same for all methods of a seed. Where the
synchronous run ends near its start it learned nothing in so few rollouts, and the others show damage alone: not which
method learns better.
"""

THROUGHPUT = """\
## Throughput

Tokens trained on a second, runs of one invocation one after the other; rounds of all settings: {rounds}. A bound of 0
is synchronous: the trainer waits for every rollout. `step` is the time that a decode step takes at least: 0 is this
machine's own speed, at which sampling is cheaper than training; the other emulates an engine that is slower than the
trainer. `over synchronous`: of the same round. `at most`: what would be gained if the synchronous trainer's waiting
were all that is saved. `waiting`, `recompute`: shares of the trainer's time.

{verdict}
"""

QUIET = 0.5
"""Load average a processor, before the start, up to which a machine counts as free."""

LOGLINEAR = """\
## Interpolation in place of the recompute

Root mean square of log pi_{v+1} as interpolated against as recomputed; for scale, of log pi_{v+1} - log pi_v itself.
"""


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page with all tables."""
    head = HEAD.format(recipe=content["recipe"], seeds=", ".join(map(str, content["seeds"])))
    parts = [head, VARIANCE]
    parts += [_variance(lr, runs) for lr, runs in content["variance"].items()]
    parts += [
        BIAS.format(rollouts=content["bias_rollouts"]),
        *(_bias(lr, runs) for lr, runs in content["bias"].items()),
    ]
    parts += [REWARDS, rewards_table(content["rewards"]), *_throughput(content["throughput"])]
    shares = {lr: spread(values, "{:.1%}") for lr, values in content["recompute_share"].items()}
    parts.append(markdown_table(("lr", "recompute, share of the runs above"), shares.items()))
    parts += [LOGLINEAR, *(_loglinear(lr, runs) for lr, runs in content["loglinear"].items())]
    added = content.get("rewards_measured_with", {})
    made_with = content["measured_with"], content["throughput"]["measured_with"], *added.values()
    heads = ("## Measured with\n", "Throughput:\n", *(f"Rewards of {name}:\n" for name in added))
    parts += [f"{head}\n{as_markdown(one)}" for head, one in zip(heads, made_with, strict=True)]
    return "\n".join(parts)


def spread(values: Sequence[float], form: str = "{:.3g}") -> str:
    """Write mean, smallest and largest of the values; a dash where there are none."""
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    return f"{form.format(fmean(values))} [{low}, {high}]"


def _variance(lr: str, runs: Sequence[Mapping[str, Any]]) -> str:
    def row(age: str) -> tuple[str, ...]:
        known = [run[age] for run in runs if age in run]
        ratio = [one["standard"] / one["segment-wise"] for one in known if one["segment-wise"]]
        kinds = [spread([one[kind] for one in known]) for kind in ("segment-wise", "standard")]
        return (age, *kinds, spread(ratio, "{:.1f}"), f"{sum(one['tokens'] for one in known):.0f}")

    ages = sorted({age for run in runs for age in run}, key=lambda age: (age == "all", age))
    head = ("age", "segment-wise", "standard", "standard / segment-wise", "tokens")
    return f"--lr {lr}\n\n" + markdown_table(head, map(row, ages))


def _bias(lr: str, runs: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    kinds = ("pooled", "single", "norm")
    rows = (
        (name, *(spread([run[name][kind] for run in runs], "{:.3f}") for kind in kinds)) for name in runs[0]
    )
    return f"--lr {lr}\n\n" + markdown_table(("weights", *kinds), rows)


def rewards_table(rewards: Mapping[str, Mapping[str, Any]]) -> str:
    def row(lr: str, methods: Mapping[str, Any]) -> tuple[str, ...]:
        starts = [run[0][1] for run in next(iter(methods.values()))]
        finals = [spread([run[-1][1] for run in runs], "{:.2f}") for runs in methods.values()]
        return (lr, spread(starts, "{:.2f}"), *finals)

    names = next(iter(rewards.values()))
    return markdown_table(("lr", "start", *names), (row(lr, methods) for lr, methods in rewards.items()))


def _throughput(measured: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text, with its verdict, and the table."""

    def row(one: Mapping[str, Any], gain: Sequence[float], most: Sequence[float]) -> tuple[str, ...]:
        numbers = (f"{one['step_seconds']:g} s", str(one["bound"]), spread(one["tokens_a_second"], "{:.0f}"))
        shares = (spread(one["waiting"], "{:.0%}"), spread(one["recompute"], "{:.1%}"))
        return (*numbers, spread(gain, "{:.2f}"), spread(most, "{:.2f}"), *shares)

    head = ("step", "bound", "tokens / s", "over synchronous", "at most", "waiting", "recompute")
    text = THROUGHPUT.format(rounds=len(measured["rows"][0]["waiting"]), verdict=verdict(measured))
    return text, markdown_table(head, (row(*one) for one in gains(measured)))


def gains(measured: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[float], list[float]]]:
    """Return each row with two lists by round: throughput over the synchronous run's, and the most to gain.

    The most to gain is the ratio where all of the synchronous trainer's waiting is saved, and nothing else.
    """
    rows = measured["rows"]
    synchronous = {row["step_seconds"]: row for row in rows if row["bound"] == 0}

    def gain(row: Mapping[str, Any], alone: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        pairs = zip(row["tokens_a_second"], alone["tokens_a_second"], strict=True)
        return [ours / theirs for ours, theirs in pairs], [1 / (1 - share) for share in alone["waiting"]]

    return [(row, *gain(row, synchronous[row["step_seconds"]])) for row in rows]


def busy(measured: Mapping[str, Any]) -> bool:
    """Whether the machine had other work."""
    return measured["load_before"] > QUIET * measured["processors"]


def verdict(measured: Mapping[str, Any]) -> str:
    """State what a measurement of throughput proves."""
    load, processors = measured["load_before"], measured["processors"]
    said = f"The load average before was {load:.1f} on {processors} processors"
    if busy(measured):
        return f"{said}: **too busy a machine to prove anything.**"
    if any(fmean(gain) > fmean(most) for row, gain, most in gains(measured) if row["bound"]):
        return f"{said}. **A gain above `at most` is an error of measurement.**"
    return f"{said}."


def _loglinear(lr: str, runs: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    def row(age: str) -> tuple[str, ...]:
        known = [run[age] for run in runs if age in run]
        return (age, *(spread([one[kind] for one in known]) for kind in ("rms", "step_rms")))

    ages = sorted({age for run in runs for age in run})
    return f"--lr {lr}\n\n" + markdown_table(("age", "error", "log pi_{v+1} - log pi_v"), map(row, ages))
