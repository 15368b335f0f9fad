"""The verdict in words: what matters first, each sentence with the number under it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mis_plugins.report import ladder
from mis_plugins.report.numbers import FIRST
from mis_plugins.report.own import Intent
from mis_plugins.report.proposal import Proposal
from mis_plugins.report.readers.source import Curve
from mis_plugins.report.survey import Report

# Where a number of docs/metrics.md turns bad. Tests hold each limit to the words of that page.
LIMITS: dict[str, tuple[float | None, float | None]] = {
    FIRST: (None, 1e-2),
    "ratio_mean": (0.98, 1.02),
    "log_prob_diff_abs_max": (None, 5.0),
    "ess_ratio": (0.5, None),
    "prob_correlation": (0.95, None),
    "kept_fraction": (0.5, None),
}
# What a number can be at all; what lies outside measures nothing.
POSSIBLE: dict[str, tuple[float, float]] = {
    FIRST: (0.0, math.inf),
    "ratio_mean": (0.0, math.inf),
    "log_prob_diff_abs_max": (0.0, math.inf),
    "ess_ratio": (0.0, 1.0),
    "prob_correlation": (-1.0, 1.0),
    "kept_fraction": (0.0, 1.0),
}
ROUNDING = 1e-5  # of a number of POSSIBLE
CALM, WATCH, ALARM = "calm", "watch", "alarm"
TOLD = "No tokens were read, so no cause can be told; name a dump to learn more."


@dataclass(frozen=True)
class Verdict:
    """What to say first.

    level: calm, watch or alarm.
    headline: one sentence.
    lines: how large, since when, where, and what would have helped.
    measured: whether a number of the mismatch was read; otherwise the level says nothing of the run.
    """

    level: str
    headline: str
    lines: tuple[str, ...]
    measured: bool = True


def beyond(values: Mapping[str, float]) -> list[str]:
    """The numbers that lie beyond their limits, in words."""
    found = []
    for name, (low, high) in LIMITS.items():
        value = values.get(name)
        if value is not None and math.isnan(value):
            found.append(f"{name} is NaN")
        elif value is not None and not possible(name, value):
            found.append(f"{name} is {value:.3g}, which cannot be")
        elif value is not None and high is not None and value > high:
            found.append(f"{name} is {value:.3g}, above {high:g}")
        elif value is not None and low is not None and value < low:
            found.append(f"{name} is {value:.3g}, below {low:g}")
    return found


def possible(name: str, value: float) -> bool:
    """Whether a number of `POSSIBLE` is finite and lies in its range, but for rounding."""
    low, high = POSSIBLE[name]
    return math.isfinite(value) and low - ROUNDING <= value <= high + ROUNDING


def verdict(report: Report, proposal: Proposal | None, own: Intent | None = None) -> Verdict:
    """The verdict on a run with tokens."""
    if not report.usable:
        return _of_nothing(report)
    kl = report.whole.get(FIRST, 0.0)
    limits = beyond(report.whole)
    level = ALARM if report.findings else WATCH if limits else CALM
    return Verdict(
        level,
        _headline(report, level),
        (
            *_size(kl, limits),
            *_why(report, level),
            *_since(report),
            *_where(report),
            *_meant(own),
            *_helped(proposal),
        ),
    )


def _of_nothing(report: Report) -> Verdict:
    """The verdict where no token can be compared, so that no number tells of a mismatch."""
    valid = int(report.whole["tokens"])
    why = (
        f"none of the {valid} valid tokens has two finite log-probs"
        if valid
        else "the loss mask keeps no token"
    )
    look = "Look at the loss masks and at the log-probs of both sides."
    return Verdict(ALARM, f"Nothing was measured: {why}.", (look,), measured=False)


def of_curves(curves: Sequence[Curve]) -> Verdict:
    """The verdict on curves without tokens, by the last value of each number: a log's row holds only some numbers."""
    known = [(name, *last[name]) for last in map(_last, curves) for name in LIMITS if name in last]
    limits = [f"{limit}, at step {step}" for name, step, x in known for limit in beyond({name: x})]
    words = "; ".join(dict.fromkeys(limits))
    if not any(map(_measures, curves)):
        why = words if known else "no curve holds a number that has a limit"
        return Verdict(ALARM, f"Nothing was read that measures the mismatch: {why}.", (TOLD,), measured=False)
    if limits:
        return Verdict(WATCH, f"Last seen beyond its limit: {words}.", (TOLD,))
    return Verdict(CALM, "The curves end within their limits.", (TOLD,))


def _measures(curve: Curve) -> bool:
    """Whether a curve holds a number that has a limit, with a value that can be."""
    return any(
        possible(name, row[name]) for row in curve.values.values() for name in POSSIBLE.keys() & row.keys()
    )


def _last(curve: Curve) -> dict[str, tuple[int, float]]:
    """Step and value where each number was logged last."""
    return {name: (step, x) for step, row in sorted(curve.values.items()) for name, x in row.items()}


def _headline(report: Report, level: str) -> str:
    if report.findings:
        first, *others = report.findings
        return first.cause.title + (f", and {_count(len(others), 'other cause')}" if others else "") + "."
    if level == WATCH:
        return "Rollout engine and trainer differ more than a healthy run; no single cause shows."
    return "Rollout engine and trainer agree as well as a healthy run."


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _size(kl: float, limits: Sequence[str]) -> list[str]:
    found = [f"How large: {FIRST} is {kl:.3g} a token. {ladder.in_words(kl)}"]
    return found + ([f"Beyond its limit: {'; '.join(limits)}."] if limits else [])


def _why(report: Report, level: str) -> list[str]:
    """What to think where much is wrong and no detector fired."""
    if level != WATCH:
        return []
    return [
        "Why: log-probs alone cannot tell. An engine of lower precision differs without the sign of any cause, and so "
        "does one whose weights are a little old: look at its quantization, and compare layers with "
        "`python -m true_on_policy diff`."
    ]


def _since(report: Report) -> list[str]:
    if len(report.steps) < 2:
        return ["Since when: one step was read, so no change over time can be seen."]
    if not report.changes:
        return [f"Since when: {FIRST} keeps its level over {len(report.steps)} steps."]
    told = (
        f"{'jumped at' if one.sudden else 'drifted around'} step {one.step} from {one.before:.2g} to {one.after:.2g}"
        for one in report.changes
    )
    return [f"Since when: {FIRST} {', '.join(told)}."]


def _where(report: Report) -> list[str]:
    """The bucket of each table whose kl_k3 stands out most against the whole run."""
    found = []
    total = sum(float(row["tokens"]) for row in report.places.get("position", ()))
    for name, rows in report.places.items():
        wide = [row for row in rows if float(row["tokens"]) > 0.01 * total]
        if len(wide) < 2:
            continue
        top, low = (choose(wide, key=lambda row: float(row["kl_k3"])) for choose in (max, min))
        if float(top["kl_k3"]) > 3 * max(float(low["kl_k3"]), 1e-12) and name != "probability":
            high, least = float(top["kl_k3"]), float(low["kl_k3"])
            found.append(f"{name} {top['bucket']} ({high:.2g}, against {least:.2g} at {low['bucket']})")
    return (
        [f"Where: most at {'; '.join(found)}."]
        if found
        else ["Where: nowhere in particular; the mismatch is spread evenly."]
    )


def _meant(own: Intent | None) -> list[str]:
    if own is None:
        return []
    short = "did what its bounds mean" if own.as_meant else "did not do what its bounds mean"
    return [f"The run's config: {own.name} {short}; {'; '.join(own.told)}."]


def _helped(proposal: Proposal | None) -> list[str]:
    if proposal is None:
        return []
    first = proposal.name if proposal.trusted else "an engine closer to the trainer"
    return [f"What to run with: {first}; {'; '.join(proposal.why)}."]
