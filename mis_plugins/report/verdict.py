"""The verdict in words: what matters first, each sentence with the number under it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mis_plugins.explain.rungs import Rung, record
from mis_plugins.report.numbers import FIRST
from mis_plugins.report.proposal import Proposal
from mis_plugins.report.readers.source import Curve
from mis_plugins.report.survey import Report


@dataclass(frozen=True)
class Limits:
    """A number's limits.

    low, high: where the number turns bad. Tests hold each limit to the words of docs/metrics.md.
    least, most: what the number can be at all; what lies outside measures nothing.
    """

    low: float = -math.inf
    high: float = math.inf
    least: float = 0.0
    most: float = math.inf


LIMITS: dict[str, Limits] = {
    FIRST: Limits(high=1e-2),
    "ratio_mean": Limits(0.98, 1.02),
    "log_prob_diff_abs_max": Limits(high=5.0),
    "ess_ratio": Limits(low=0.5, most=1.0),
    "prob_correlation": Limits(low=0.95, least=-1.0, most=1.0),
    "kept_fraction": Limits(low=0.5, most=1.0),
}
ROUNDING = 1e-5  # by which a number may lie outside of what it can be
AS_MUCH = 3.0  # within this factor of a rung a mismatch counts as that rung's
CALM, WATCH, ALARM = "calm", "watch", "alarm"
TOLD = "No tokens were read, so no cause can be told; name a dump to learn more."
WHY = (
    "Why: log-probs alone cannot tell. An engine of lower precision differs without the sign of any cause, and so does "
    "one whose weights are a little old: look at its quantization, and compare layers with "
    "`python -m true_on_policy diff`."
)


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
    return [
        f"{name} is {words}" for name in LIMITS if name in values and (words := _beyond(name, values[name]))
    ]


def _beyond(name: str, value: float) -> str:
    limits = LIMITS[name]
    if math.isnan(value):
        return "NaN"
    if not possible(name, value):
        return f"{value:.3g}, which cannot be"
    if value > limits.high:
        return f"{value:.3g}, above {limits.high:g}"
    return f"{value:.3g}, below {limits.low:g}" if value < limits.low else ""


def possible(name: str, value: float) -> bool:
    """Whether a number of `LIMITS` is finite and can be at all, but for rounding."""
    limits = LIMITS[name]
    return math.isfinite(value) and limits.least - ROUNDING <= value <= limits.most + ROUNDING


def verdict(report: Report, proposal: Proposal | None) -> Verdict:
    """The verdict on a run with tokens."""
    if not report.usable:
        return _of_nothing(report)
    limits = beyond(report.whole)
    level = ALARM if report.findings else WATCH if limits else CALM
    lines = (
        f"How large: {FIRST} is {report.whole[FIRST]:.3g} a token. {in_words(report.whole[FIRST])}",
        *([f"Beyond its limit: {'; '.join(limits)}."] if limits else []),
        *([WHY] if level == WATCH else []),
        _since(report),
        _where(report),
        *([_helped(proposal)] if proposal else []),
    )
    return Verdict(level, _headline(report, level), lines)


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
    rows = [(name, step, x) for curve in curves for name, (step, x) in _last(curve).items()]
    limits = [f"{limit}, at step {step}" for name, step, x in rows for limit in beyond({name: x})]
    words = "; ".join(dict.fromkeys(limits))
    values = (row.items() for curve in curves for row in curve.values.values())
    if not any(possible(name, x) for row in values for name, x in row if name in LIMITS):
        why = words or "no curve holds a number that has a limit"
        return Verdict(ALARM, f"Nothing was read that measures the mismatch: {why}.", (TOLD,), measured=False)
    if limits:
        return Verdict(WATCH, f"Last seen beyond its limit: {words}.", (TOLD,))
    return Verdict(CALM, "The curves end within their limits.", (TOLD,))


def _last(curve: Curve) -> dict[str, tuple[int, float]]:
    """Step and value where each number that has a limit was logged last."""
    rows = sorted(curve.values.items())
    return {name: (step, row[name]) for name in LIMITS for step, row in rows if name in row}


def _headline(report: Report, level: str) -> str:
    if report.findings:
        first, *others = report.findings
        more = f", and {len(others)} other cause{'s' if len(others) > 1 else ''}" if others else ""
        return f"{first.cause.title}{more}."
    if level == WATCH:
        return "Rollout engine and trainer differ more than a healthy run; no single cause shows."
    return "Rollout engine and trainer agree as well as a healthy run."


def _since(report: Report) -> str:
    if len(report.steps) < 2:
        return "Since when: one step was read, so no change over time can be seen."
    if not report.changes:
        return f"Since when: {FIRST} keeps its level over {len(report.steps)} steps."
    changes = (
        f"{'jumped at' if one.sudden else 'drifted around'} step {one.step} from {one.before:.2g} to {one.after:.2g}"
        for one in report.changes
    )
    return f"Since when: {FIRST} {', '.join(changes)}."


def _where(report: Report) -> str:
    """The bucket of each table whose kl_k3 stands out most against the whole run."""
    found = []
    total = sum(float(row["tokens"]) for row in report.places.get("position", ()))
    for name, rows in report.places.items():
        wide = {
            float(row["kl_k3"]): row["bucket"]
            for row in reversed(rows)
            if float(row["tokens"]) > 0.01 * total
        }
        high, low = max(wide, default=0.0), min(wide, default=0.0)
        if high > 3 * max(low, 1e-12) and name != "probability":
            found.append(f"{name} {wide[high]} ({high:.2g}, against {low:.2g} at {wide[low]})")
    if not found:
        return "Where: nowhere in particular; the mismatch is spread evenly."
    return f"Where: most at {'; '.join(found)}."


def _helped(proposal: Proposal) -> str:
    first = proposal.name if proposal.trusted else "an engine closer to the trainer"
    return f"What to run with: {first}; {'; '.join(proposal.why)}."


# How large a mismatch is, beside that of one real model, which `explain/rungs.py` records.


def nearest(kl_k3: float, rungs: Sequence[Rung]) -> Rung:
    """The rung whose k3 is nearest by its logarithm."""
    return min(rungs, key=lambda rung: abs(math.log(max(kl_k3, 1e-12) / rung.k3)))


def in_words(kl_k3: float) -> str:
    """Where a kl_k3 stands on the ladder."""
    if kl_k3 <= 1e-10:
        return (
            "Both policies agree to rounding: there is nothing to correct, or the run stored the engine's log-probs as "
            "the trainer's, as a bypass does; then log the trainer's own."
        )
    rungs = record().steps
    rung = nearest(kl_k3, rungs)
    if rung.k3 / AS_MUCH <= kl_k3 <= AS_MUCH * rung.k3:
        return f"A real model shows as much ({rung.k3:.2g}) with an engine in {rung.words}."
    shown = f"a real model shows with an engine in {rung.name}"
    below = [one for one in rungs if one.k3 < kl_k3]
    above = [one for one in rungs if one.k3 > kl_k3]
    if not below:
        return f"The mismatch is {rung.k3 / kl_k3:.0f} times less than {shown}."
    if not above:
        return f"The mismatch is {kl_k3 / rung.k3:.0f} times what {shown}."
    low, high = below[-1], above[0]
    return (
        f"The mismatch lies between what a real model shows with an engine in {low.name} ({low.k3:.2g}) and in "
        f"{high.name} ({high.k3:.2g})."
    )
