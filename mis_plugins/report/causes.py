"""Detectors of the causes of a mismatch; `causes.yaml` says of each what it looks like, its cause, and how to mend it.

A detector reads `Facts` and returns the numbers of its evidence, or None where there is none, or too little data to
tell. `lab/report_causes.py` measures how often each is right: 50 clean runs, and 50 with each cause planted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
Numbers = Mapping[str, Any]  # what a detector saw, by the names that the words of its evidence have


@dataclass(frozen=True)
class Facts:
    """Everything that a detector may read of a run.

    sums: sums of the whole run, by the names of `metrics/tokens.py`.
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
    evidence: what was seen in a run, with the detector's numbers in braces.
    threshold: where the detector draws the line, and why there.
    explains: causes whose detectors fire too where this one is at work.
    """

    title: str
    symptom: str
    cause: str
    fix: str
    evidence: str
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
    seen = {name: numbers for name, detect in DETECTORS.items() if (numbers := detect(facts)) is not None}
    explained = {other for name in seen for other in CAUSES[name].explains}
    return [
        Finding(
            name, cause, cause.evidence.format(**numbers), tuple(one for one in cause.explains if one in seen)
        )
        for name, numbers in seen.items()
        if name not in explained and (cause := CAUSES[name])
    ]


def _nonfinite(facts: Facts) -> Numbers | None:
    train, rollout = (facts.sums.get(f"nonfinite_{side}", 0.0) for side in ("train", "rollout"))
    return {"train": train, "rollout": rollout} if train + rollout else None


def _broken_advantages(facts: Facts) -> Numbers | None:
    count = facts.evidence.broken_advantages
    return {"count": count} if count else None


def _placeholder(facts: Facts) -> Numbers | None:
    count = facts.evidence.sure_yet_unlikely
    share = count / max(facts.sums["usable"], 1)
    return {"count": count, "share": share} if count >= 3 and share >= SURE_SHARE else None


def _changed_response(facts: Facts) -> Numbers | None:
    if facts.evidence.moments["size"].count < LEAST_SEQUENCES:
        return None
    size, correlation = torch.cat(facts.evidence.sizes), torch.cat(facts.evidence.correlations)
    others = float(size.median())
    broken = int(((correlation < BROKEN_CORRELATION) & (size > max(BROKEN_SIZE, 5 * others))).sum())
    return (
        {"broken": broken, "all": size.numel(), "others": others} if 0 < broken <= size.numel() / 2 else None
    )


def _end_token(facts: Facts) -> Numbers | None:
    return _of_part(facts, "end", END_FACTOR)


def _template(facts: Facts) -> Numbers | None:
    return _of_part(facts, "beginning", BEGINNING_FACTOR)


def _of_part(facts: Facts, part: str, factor: float) -> Numbers | None:
    """Moments of the responses where the |log r| of a part stands out from that of their middle."""
    moments = facts.evidence.moments
    found, middle, excess = moments[part], moments["middle"], moments[f"{part}_excess"]
    if found.count < LEAST_SEQUENCES or found.mean < factor * middle.mean:
        return None
    return moments if excess.mean > STANDARD_ERRORS * excess.error else None


def _raw(facts: Facts) -> Numbers | None:
    found = facts.relation
    if found is None or found.tokens < slope.LEAST_TOKENS or not slope.not_sampled_from(found):
        return None
    scale = f"; the slope of log pi_old on log mu is {found.slope:.3f}" if slope.scaled(found) else ""
    return {"found": found, "scale": scale}


def _temperature(facts: Facts) -> Numbers | None:
    found = facts.relation
    scaled = found is not None and slope.scaled(found) and not slope.not_sampled_from(found)
    return {"found": found} if scaled else None


def _cut_off(facts: Facts) -> Numbers | None:
    found = facts.relation
    if found is None or found.tokens < slope.LEAST_TOKENS or not slope.cut_off(found):
        return None
    even = found.mean_log_ratio <= 0 and abs(math.log(found.mean_ratio) - found.mean_log_ratio) <= 0.2
    return {"found": found} if even else None


def _other_weights(facts: Facts) -> Numbers | None:
    tokens, found = facts.sums["usable"], facts.relation
    mean = facts.sums["log_ratio"] / max(tokens, 1)
    if tokens < LEAST_TOKENS or mean > -slope.UNLIKELY or (found is not None and slope.cut_off(found)):
        return None
    return {"mean": mean}


def _buckets(facts: Facts, place: str) -> dict[str, Moments]:
    """Moments of k3 in each bucket of a place."""
    rows = facts.places.get(place, ())
    numbers = ([float(row[name]) for name in ("tokens", "kl_k3", "k3_squared")] for row in rows)
    moments = [Moments(n, n * mean, n * square) for n, mean, square in numbers]
    return {str(row["bucket"]): one for row, one in zip(rows, moments, strict=True)}


def _beyond(low: Moments, high: Moments, factor: float) -> bool:
    """Whether the mean of `high` lies above that of `low` by a factor, and by `STANDARD_ERRORS`."""
    if high.count < LEAST_TOKENS or not low.count:
        return False
    error = math.sqrt(low.variance / low.count + high.variance / high.count)
    return high.mean >= factor * low.mean and high.mean - low.mean >= STANDARD_ERRORS * error


def _stale(facts: Facts) -> Numbers | None:
    known = _buckets(facts, "age")
    fresh, old = known.pop("0", Moments()), Moments.sum(known.values())
    stale = fresh.count >= LEAST_TOKENS and _beyond(fresh, old, AGE_FACTOR)
    return {"fresh": fresh, "old": old} if stale else None


def _route(facts: Facts) -> Numbers | None:
    known = _buckets(facts, "route")
    same, differs = (known.get(name, Moments()) for name in ("same", "differs"))
    if not _beyond(same, differs, ROUTE_FACTOR):
        return None
    return {"same": same, "differs": differs, "share": differs.count / (same.count + differs.count)}


def _jump(facts: Facts) -> Numbers | None:
    up = (one for one in facts.changes if one.sudden and one.apart and one.factor >= JUMP_FACTOR)
    first = next(up, None)
    return None if first is None else {"change": first}


def _differing_weights(facts: Facts) -> Numbers | None:
    if facts.evidence.by_id is None:
        return None
    share, errors = id_share(facts.evidence.by_id)
    return {"share": share, "errors": errors} if share >= ID_SHARE and errors >= STANDARD_ERRORS else None


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


DETECTORS: dict[str, Callable[[Facts], Numbers | None]] = {
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
