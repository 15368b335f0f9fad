"""Detectors of the causes of a mismatch; `causes.yaml` says of each what it looks like, its cause, and how to mend it.

A detector reads `Facts` and returns the evidence in words, or None. `lab/report_causes.py` measures how often
each detector is right: 50 clean runs, and 50 with each cause planted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from mis_plugins.metrics import slope
from mis_plugins.report.changes import Change
from mis_plugins.report.evidence import Evidence, Moments

STANDARD_ERRORS = 6.0
LEAST_SEQUENCES = 16
END_FACTOR = 5.0
BEGINNING_FACTOR = 2.0
ID_SHARE = 0.013
BROKEN_CORRELATION, BROKEN_SIZE = 0.5, 1.0
ROUTE_FACTOR, AGE_FACTOR, JUMP_FACTOR = 1.2, 2.0, 2.0
LEAST_TOKENS = 200
SURE_SHARE = 1e-4

Table = Sequence[Mapping[str, float | str]]


@dataclass(frozen=True)
class Facts:
    """Everything that a detector may read of a run.

    sums: sums of the whole run, by the names of `metrics/rows.py`.
    places: tables of `places.Tables`.
    changes: changes of kl_k3 over the steps.
    """

    sums: Mapping[str, float]
    evidence: Evidence
    places: Mapping[str, Table]
    changes: Sequence[Change]

    @property
    def relation(self) -> slope.Relation | None:
        return slope.relation(self.sums)


@dataclass(frozen=True)
class Cause:
    """One cause of a mismatch.

    symptom: what a report shows where the cause is at work.
    cause: what is wrong.
    fix: what to do.
    threshold: where the detector draws the line, and why there.
    explains: causes whose detectors fire too where this one is at work.
    """

    title: str
    symptom: str
    cause: str
    fix: str
    threshold: str
    explains: Sequence[str] = ()


@dataclass(frozen=True)
class Finding:
    """A cause that a detector found, with the evidence.

    also: other causes whose signs this one brings about, so that they are not told apart from it.
    """

    name: str
    cause: Cause
    evidence: str
    also: tuple[str, ...] = ()


def findings(facts: Facts) -> list[Finding]:
    """The causes that show, less those whose signs another one explains."""
    shown = {name: evidence for name, detect in DETECTORS.items() if (evidence := detect(facts)) is not None}
    explained = {other for name in shown for other in CAUSES[name].explains}
    return [
        Finding(name, CAUSES[name], evidence, tuple(one for one in CAUSES[name].explains if one in shown))
        for name, evidence in shown.items()
        if name not in explained
    ]


def _nonfinite(facts: Facts) -> str | None:
    train, rollout = (facts.sums.get(f"nonfinite_{side}", 0.0) for side in ("train", "rollout"))
    if not train + rollout:
        return None
    return f"{train:.0f} trainer log-probs and {rollout:.0f} rollout log-probs of valid tokens are NaN or infinite."


def _broken_advantages(facts: Facts) -> str | None:
    count = facts.evidence.broken_advantages
    return f"{count} advantages of valid tokens are NaN or infinite." if count else None


def _placeholder(facts: Facts) -> str | None:
    count, usable = facts.evidence.sure_yet_unlikely, max(facts.sums["usable"], 1)
    if count < 3 or count / usable < SURE_SHARE:
        return None
    return (
        f"{count} valid tokens ({count / usable:.2%}) have a rollout log-prob of exactly 0, while the trainer finds "
        "them unlikely: placeholders of tokens that the engine never sampled."
    )


def _changed_response(facts: Facts) -> str | None:
    if not facts.evidence.sizes:
        return None
    size, correlation = torch.cat(facts.evidence.sizes), torch.cat(facts.evidence.correlations)
    if size.numel() < LEAST_SEQUENCES:
        return None
    others = float(size.median())
    broken = int(((correlation < BROKEN_CORRELATION) & (size > max(BROKEN_SIZE, 5 * others))).sum())
    if not broken or broken > size.numel() / 2:
        return None
    return (
        f"In {broken} of {size.numel()} sequences the two lists of log-probs have nothing to do with each other "
        f"(correlation below {BROKEN_CORRELATION}, mean |log r| above {BROKEN_SIZE:g}), while the median sequence has "
        f"a mean |log r| of {others:.2g}."
    )


def _stands_out(facts: Facts, part: str, factor: float) -> tuple[Moments, Moments] | None:
    """|log r| of the responses' `part` and of their middle; None where the part does not stand out."""
    found, middle, excess = (facts.evidence.moments[name] for name in (part, "middle", f"{part}_excess"))
    if found.count < LEAST_SEQUENCES or found.mean < factor * middle.mean:
        return None
    return (found, middle) if excess.mean > STANDARD_ERRORS * excess.error else None


def _end_token(facts: Facts) -> str | None:
    if (found := _stands_out(facts, "end", END_FACTOR)) is None:
        return None
    end, middle = found
    return (
        f"The last token of a response has a mean |log r| of {end.mean:.2g}, the tokens before it {middle.mean:.2g} "
        f"({end.count:.0f} responses that ended by themselves)."
    )


def _template(facts: Facts) -> str | None:
    if (found := _stands_out(facts, "beginning", BEGINNING_FACTOR)) is None:
        return None
    first, middle = found
    return (
        f"The first four tokens of a response have a mean |log r| of {first.mean:.2g}, later ones {middle.mean:.2g}; "
        f"the mean log r of the first ones is {facts.evidence.moments['beginning_signed'].mean:+.2g}."
    )


def _raw(facts: Facts) -> str | None:
    found = facts.relation
    if found is None or found.tokens < slope.LEAST_TOKENS or not slope.not_sampled_from(found):
        return None
    scale = f"; the slope of log pi_old on log mu is {found.slope:.3f}" if slope.scaled(found) else ""
    return (
        f"The mean of pi_old / mu is {found.mean_ratio:.4f} +- {found.mean_ratio_error:.4f}, and can only be 1 where "
        f"mu is what the engine sampled from{scale}."
    )


def _temperature(facts: Facts) -> str | None:
    found = facts.relation
    if found is None or not slope.scaled(found) or slope.not_sampled_from(found):
        return None
    return (
        f"log pi_old follows log mu with a slope of {found.slope:.3f} (inverse regression {found.inverse:.3f}), as if "
        f"the engine's log-probs alone were divided by a temperature of {found.implied_temperature:.2f} or one "
        "further from 1."
    )


def _cut_off(facts: Facts) -> str | None:
    found = facts.relation
    if found is None or found.tokens < slope.LEAST_TOKENS or not slope.cut_off(found):
        return None
    if found.mean_log_ratio > 0 or abs(math.log(found.mean_ratio) - found.mean_log_ratio) > 0.2:
        return None
    return (
        f"The mean of pi_old / mu is {found.mean_ratio:.4f} +- {found.mean_ratio_error:.4f}: the engine samples from "
        f"{found.mean_ratio:.1%} of the probability mass and renormalizes."
    )


def _other_weights(facts: Facts) -> str | None:
    tokens, found = facts.sums["usable"], facts.relation
    mean = facts.sums["log_ratio"] / max(tokens, 1)
    if tokens < LEAST_TOKENS or mean > -slope.UNLIKELY or (found is not None and slope.cut_off(found)):
        return None
    return (
        f"The mean of log pi_old - log mu is {mean:.2f} a token: the trainer finds the engine's tokens unlikely nearly "
        "everywhere."
    )


def _buckets(facts: Facts, place: str) -> dict[str, Moments]:
    """Moments of k3 in each bucket of a place."""
    return {
        str(row["bucket"]): Moments(
            n := float(row["tokens"]), n * float(row["kl_k3"]), n * float(row["k3_squared"])
        )
        for row in facts.places.get(place, ())
    }


def _beyond(low: Moments, high: Moments, factor: float) -> bool:
    """Whether the mean of `high` lies above that of `low` by a factor, and by `STANDARD_ERRORS`."""
    if high.count < LEAST_TOKENS or not low.count:
        return False
    error = math.sqrt(low.variance / low.count + high.variance / high.count)
    return high.mean >= factor * low.mean and high.mean - low.mean >= STANDARD_ERRORS * error


def _stale(facts: Facts) -> str | None:
    known = _buckets(facts, "age")
    fresh, old = known.pop("0", Moments()), Moments.sum(known.values())
    if fresh.count < LEAST_TOKENS or not _beyond(fresh, old, AGE_FACTOR):
        return None
    return f"kl_k3 is {fresh.mean:.2g} at age 0 and {old.mean:.2g} at age 1 and above."


def _jump(facts: Facts) -> str | None:
    up = [one for one in facts.changes if one.sudden and one.apart and one.factor >= JUMP_FACTOR]
    if not up:
        return None
    first = up[0]
    return (
        f"kl_k3 jumps from {first.before:.2g} to {first.after:.2g} at step {first.step}, and stays there: other "
        "weights or settings of the engine, or a policy that became unstable."
    )


def _differing_weights(facts: Facts) -> str | None:
    table = facts.evidence.by_id
    if table is None:
        return None
    share, errors = id_share(table)
    if share < ID_SHARE or errors < STANDARD_ERRORS:
        return None
    return (
        f"{share:.1%} of what separates the policies is the same at every occurrence of a token id ({errors:.0f} "
        "standard errors): the weights of both sides differ. Which layers do, log-probs do not tell."
    )


def id_share(table: torch.Tensor) -> tuple[float, float]:
    """Share of the variance of log r that belongs to the token id beyond two lines, and its standard errors.

    One line is in log mu; the other in the variance of log r within the id, which lowers the mean of an id by itself,
    because an engine samples what its own error makes likelier. The share is the mean product of two residuals of one
    id, over the mean square of a residual: 0 where residuals of different occurrences are independent, whatever their
    sizes are. An id that occurs n times counts n times.
    """
    n, r, m, rr, mm, rm = table.sum(1).tolist()
    if n < LEAST_TOKENS:
        return 0.0, 0.0
    spread = mm / n - (m / n) ** 2
    line = (rm / n - r * m / n**2) / spread if spread > 0 else 0.0
    shift = r / n - line * m / n
    count, sr, sm, srr, smm, srm = table[:, table[0] >= 2].unbind()
    total = sr - line * sm - shift * count
    squares = srr + line**2 * smm + shift**2 * count - 2 * line * srm - 2 * shift * (sr - line * sm)
    total, squares = _less_own_variance(count, total, squares)
    products = ((total.square() - squares) / (count - 1)).sum()
    error = (2 * squares.square() / (count * (count - 1))).sum().sqrt()
    if not squares.sum() > 0:
        return 0.0, 0.0
    return float(products / squares.sum()), float(products / error)


def _less_own_variance(
    count: torch.Tensor, total: torch.Tensor, squares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of residuals and of their squares for each id, less a line in the variance within the id."""
    variance = (squares - total.square() / count) / (count - 1)
    centred = variance - (variance * count).sum() / count.sum()
    spread = (count * centred.square()).sum()
    moved = centred * ((total * centred).sum() / spread if spread > 0 else 0.0)
    return total - moved * count, squares - 2 * moved * total + count * moved.square()


def _route(facts: Facts) -> str | None:
    known = _buckets(facts, "route")
    same, differs = (known.get(name, Moments()) for name in ("same", "differs"))
    if not _beyond(same, differs, ROUTE_FACTOR):
        return None
    share = differs.count / (same.count + differs.count)
    values = f"kl_k3 is {differs.mean:.2g}, elsewhere {same.mean:.2g}."
    return f"Where the experts differ ({share:.1%} of the tokens) {values}"


DETECTORS: dict[str, Callable[[Facts], str | None]] = {
    "non-finite": _nonfinite,
    "non-finite-advantage": _broken_advantages,
    "placeholder": _placeholder,
    "changed-response": _changed_response,
    "end-token": _end_token,
    "template": _template,
    "raw-log-probs": _raw,
    "temperature": _temperature,
    "top-p": _cut_off,
    "other-weights": _other_weights,
    "stale-weights": _stale,
    "jump": _jump,
    "differing-weights": _differing_weights,
    "route": _route,
}
CAUSES = {
    name: Cause(**words)
    for name, words in yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text("utf-8")).items()
}
CANNOT = (
    "Log-probs of sampled tokens alone cannot tell: which layer differs, whether both sides share one mistake, what "
    "the tokens would have been without the mismatch, and lower precision from weights that are a little old in a "
    "single step without versions. Nor do they tell whether the run would have fallen without any mismatch, by its "
    "learning rate or its rewards, which no config mends: run it once with the trainer's own precision in the engine."
)
