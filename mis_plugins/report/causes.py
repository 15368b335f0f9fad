"""Detectors of the causes of a mismatch; `causes.yaml` says of each what it looks like, its cause, and how to mend it.

A detector reads `Facts` and returns its evidence, or None where there is none, or too little data to tell. All are
scored on one measure, the share of the mismatch that the cause accounts for, so that rivals can be compared.
`lab/report_causes.py` measures how often the first one is right.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Bool, Float
from torch import Tensor

from mis_plugins.explain.limits import FIRST, LIMITS
from mis_plugins.metrics import slope
from mis_plugins.metrics.slope import STANDARD_ERRORS
from mis_plugins.report.changes import SIDE, Change
from mis_plugins.report.evidence import LONG_ENOUGH, RELATED, Evidence, as_normal
from mis_plugins.report.lists import Pairing
from mis_plugins.report.places import PLACES, SHARES, Tables

LEAST_SEQUENCES = 16
END_FACTOR = 5.0
BEGINNING_FACTOR = 1.75
ID_SHARE, ID_SHARE_OF_K3 = 0.013, 0.05
ROUTE_FACTOR, AGE_FACTOR, JUMP_FACTOR = 1.2, 2.0, 2.0
LEAST_TOKENS = 200
FEW = 100  # an fp8 engine stays below the limit of kl_k3 in 15% of draws of 20 tokens, and in 0.7% of 100
LEAST_TO_RELATE = 1000  # tokens, from which the standard errors of slopes are taken over folds of sequences
FLAT = 0.95  # geometric mean of both slopes: errors of either side bring it to 0.99 or above, never below
CUT_DEEP, CUT_MASS = 0.7, 1.2  # largest mean ratio and `mass` of tokens that a deep cut leaves alone
PROPORTIONAL = 0.75  # of (log r)^2 that a factor accounts for: one list is the other's multiple
UNITS = (abs(math.log(math.log(2))), math.log(math.log(10)))  # of logarithms to base 2 and 10, by either side
LEFT, MOST_FACTOR = 0.1, 8.0  # of (log r)^2 beside a unit: int5 leaves 0.07, a temperature 0.2 or more
NEGATIVE_KL = 0.002  # a mean of log r above 0, which samples of mu cannot give
ERRORS_BESIDE = 4.0  # standard errors that count where another measure counts too
SURE_SHARE, FILLS = 1e-4, 8
SHOWN = 8  # numbers or names of one kind that evidence lists
RARE = 1e-9  # chance below which a part of the responses is a sign, about that of six standard errors
AS_LARGE = 0.5  # a cause explains the sign of another that accounts for at most twice as much
LEAST_SHARE = 0.06  # of the mismatch; a sign that low precision brings about too comes first from here on

EVEN, LEVEL = {"tokens": 0.06, "responses": 0.6}, 0.25  # half of what the engines of the ladder show, and less
SPLIT = 4  # fewest responses, factor and deviations between two sizes of mismatch; recorded engines reach 2 and 3
ROUNDS = 16  # in which the line between two sizes of mismatch comes to rest
ALIKE = 0.8  # share of the responses over which the mismatch is spread; recorded engines show 0.83 and more
LOCAL = {"placeholder", "changed-response", "end-token", "template", "stale-weights", "jump", "rise", "route"}
PART = 0.2
OF_PLACES = {"placeholder", "different-tokens", "changed-response", "end-token", "template", "route", "stale-weights"}
OF_ALL = ("swapped", "unit", "raw-log-probs", "temperature", "top-p")  # act on all tokens alike
ROUNDING = 1e-4  # of the logarithm of a factor between two lists, which a file may hold in half precision
UNMEASURED = {"non-finite", "non-finite-advantage"}  # no part of the numbers' mismatch
PRECISION, WEIGHTS = "precision", {"differing-weights", "other-weights"}  # weights tell more than precision
Table = Sequence[Mapping[str, float | str]]
Numbers = Mapping[str, Any]  # what a detector saw, by the names that the words of its evidence have


@dataclass(frozen=True)
class Facts:
    """Everything that a detector may read of a run.

    sums: sums of the whole run, by the names of `metrics/tokens.py`.
    tables: sums of the run by places.
    changes: changes of kl_k3 over the steps, joined until they hold `FEW` tokens.
    """

    sums: Mapping[str, float]
    evidence: Evidence
    tables: Tables
    changes: Sequence[Change]

    @cached_property
    def places(self) -> Mapping[str, Table]:
        return self.tables.rows()

    @cached_property
    def rows(self) -> Float[Tensor, "3 N"]:
        """`Evidence.rows` of all sequences."""
        return torch.cat(self.evidence.rows, 1)

    @cached_property
    def line(self) -> "Line | None":
        """How one list follows the other, where tokens are enough to tell anything by."""
        relation = _relation(self.evidence.folds.sum(1))
        return None if relation is None or self.sums["usable"] < FEW else Line(self, relation)

    @cached_property
    def means(self) -> dict[str, float]:
        """Means over the usable tokens, by the names of `RELATED`; 0 of none."""
        n, *totals = self.evidence.folds.sum(1).tolist()
        return {name: total / max(n, 1) for name, total in zip(RELATED[1:], totals, strict=True)}

    @property
    def mean(self) -> float:
        """The mean of log pi_old - log mu."""
        return self.means["proximal"] - self.means["behavior"]

    @property
    def kl_k3(self) -> float:
        return self.means["ratio"] - 1 - self.mean

    @property
    def square(self) -> float:
        """The mean of (log pi_old - log mu)^2."""
        squares = self.means["behavior_squared"] + self.means["proximal_squared"]
        return max(squares - 2 * self.means["log_prob_product"], 1e-30)

    @property
    def kl(self) -> float:
        """The KL that correlations of clean runs are compared at."""
        return min(max(-self.mean, 0.0), self.kl_k3)

    @cached_property
    def mass(self) -> float:
        """The sum of `mass` over all tokens."""
        return max(float(self.rows[2].sum()), 1e-30)

    @cached_property
    def spread(self) -> dict[str, float]:
        """The share of the tokens, and of the responses, over which the mismatch is as good as spread."""
        count, mass, squared = self.tables.sums["position"][[0, -2, -1]].sum(1).tolist()
        _, counts, masses = self.rows[:, self.rows[1] >= LONG_ENOUGH]
        squares = float((masses.square() / counts).sum() * counts.sum())
        responses = float(masses.sum()) ** 2 / squares if len(masses) >= LEAST_SEQUENCES and squares else 1.0
        tokens = mass**2 / (count * squared) if squared else 1.0
        return {"tokens": tokens, "responses": responses}

    @property
    def is_even(self) -> bool:
        """Whether the mismatch is spread over tokens, responses and places as an engine's that errs everywhere."""
        places = (rows for name, rows in self.places.items() if name in ("position", "length", "turn"))
        return all(self.spread[name] >= least for name, least in EVEN.items()) and all(map(_is_level, places))

    @cached_property
    def away(self) -> "Facts":
        """Facts of the tokens that no cause of one place, or of some sequences, touches."""
        return self.within(~self.broken)

    @cached_property
    def heavy(self) -> Bool[Tensor, " N"]:
        """The responses above the line between two sizes of mismatch a token.

        The line starts at the mean. It moves, `ROUNDS` times, to the middle between the mean logarithms of both parts.
        Logarithms let a few responses count as a part.
        """
        size = (self.rows[2] / self.rows[1].clamp(min=1) * self.rows[1].sum() / self.mass).clamp(min=1e-30).log()
        line, counted = 0.0, size[self.measured]
        for _ in range(ROUNDS):
            parts = counted[counted > line], counted[counted <= line]
            line = float(sum(part.mean() for part in parts)) / 2 if all(map(len, parts)) else line
        return size > line

    @cached_property
    def measured(self) -> Bool[Tensor, " N"]:
        """The responses whose own size of mismatch can be told."""
        return (self.rows[1] >= LONG_ENOUGH) & (self.rows[2] > 0)

    @cached_property
    def part(self) -> "Facts | None":
        """Facts of the `heavy` responses, where these differ from the others more than an engine makes them."""
        return self.within(self.heavy) if self.spread["responses"] < ALIKE else None

    @cached_property
    def is_split(self) -> bool:
        """Whether responses of any length have one of two sizes of mismatch, as where one engine of several errs."""
        (_, counts, masses), heavy = self.rows[:, self.measured], self.heavy[self.measured]
        if min(heavy.count_nonzero(), (~heavy).count_nonzero()) < SPLIT:
            return False
        apart, within, _ = _beyond_the_others((masses / counts).log(), heavy)
        longer, _, error = _beyond_the_others(counts.log(), heavy)
        return apart > max(math.log(SPLIT), SPLIT * within) and abs(longer) <= STANDARD_ERRORS * error

    def share(self, part: Bool[Tensor, " N"]) -> float:
        """The share of the mismatch that some responses have."""
        return float(self.rows[2, part].sum()) / self.mass

    def where(self, part: Bool[Tensor, " N"]) -> str:
        """How many responses a part has, in words."""
        return f"In {int(part.sum())} of {len(part)} responses, which have {self.share(part):.0%} of the mismatch: "

    @cached_property
    def broken(self) -> Bool[Tensor, " N"]:
        """The responses of which the two lists belong to different tokens."""
        return self.evidence.lists.broken(self.kl)

    def within(self, kept: Bool[Tensor, " N"]) -> "Facts":
        """Facts of the inner tokens of some responses."""
        folds = self.evidence.within(kept)
        evidence = replace(self.evidence, folds=folds)
        return replace(self, sums={**self.sums, "usable": float(folds[0].sum())}, evidence=evidence)

    @cached_property
    def pairing(self) -> Pairing | None:
        return self.evidence.lists.verdict(self.kl)

    @cached_property
    def levels(self) -> list[Float[Tensor, "3 _"]]:
        """`rows` of the responses of each level of kl_k3; the first level ends at the first change."""
        edges = [-math.inf, *(change.step for change in self.changes), math.inf]
        return [self.rows[:, (self.rows[0] >= low) & (self.rows[0] < high)] for low, high in pairwise(edges)]


@dataclass(frozen=True)
class Line:
    """How log pi_old follows log mu: `metrics/slope.py` says what each number tells."""

    facts: Facts
    relation: slope.Relation

    def error(self, number: str) -> float:
        """Standard error of a number of the relation: each fold of sequences is left out in turn."""
        folds = self.facts.evidence.folds
        held = folds[:, folds[0] > 0]
        left = [_relation(held.sum(1) - fold) for fold in held.T]
        numbers = [getattr(relation, number) for relation in left if relation is not None]
        estimates = torch.tensor(numbers, dtype=torch.float64)
        few = self.relation.tokens < LEAST_TO_RELATE or len(estimates) < LEAST_SEQUENCES
        return math.inf if few else float(estimates.var(correction=0) * (len(estimates) - 1)) ** 0.5

    @cached_property
    def off_one(self) -> int:
        """1 where the mean of pi_old / mu is above 1 by more than its error, -1 where it is below, else 0."""
        mean = self.relation.mean_ratio
        error = STANDARD_ERRORS * self.relation.mean_ratio_error
        if self.relation.tokens < LEAST_TO_RELATE or abs(mean - 1) <= max(slope.RATIO_MARGIN, error):
            return 0
        return 1 if mean > 1 else -int(self.relation.ess > slope.LEAST_ESS)

    @cached_property
    def is_scaled(self) -> bool:
        """Whether one side is a multiple of the other by more than noise gives."""
        if self.is_flat or self.is_multiple:
            return True
        off, error = self.relation.nearest - 1, max(self.error("slope"), self.error("inverse"))
        if abs(off) < max(slope.SLOPE_MARGIN, STANDARD_ERRORS * error):
            return False
        by_noise = off < 2 * self.relation.unexplained and self.off_one <= 0
        by_cut = self.off_one < 0 and not _are_lowered(self.facts)
        return off < 0 or not (by_noise or by_cut)

    @cached_property
    def is_flat(self) -> bool:
        """Whether log pi_old varies less than log mu over tokens that mu sampled, as below a temperature of 1 alone."""
        temperature = self.relation.implied_temperature
        if self.relation.mean_log_ratio > 0 or temperature > FLAT:
            return False
        return 1 - temperature > STANDARD_ERRORS * self.error("implied_temperature")

    @cached_property
    def factor(self) -> tuple[float, float]:
        """By which factor log pi_old is log mu, and the share of (log r)^2, or of (log pi_old)^2, that it leaves."""
        names = ("behavior_squared", "proximal_squared", "log_prob_product")
        xx, yy, xy = (self.facts.means[name] for name in names)
        left = yy - xy * xy / max(xx, 1e-30)
        return math.sqrt(yy / max(xx, 1e-30)), left / max(min(self.facts.square, yy), 1e-30)

    @property
    def factor_margin(self) -> float:
        """By how much noise may move the logarithm of the factor: twice what noise leaves, and six standard errors."""
        left = self.relation.unexplained
        return 2 * left + STANDARD_ERRORS * math.sqrt(left / self.relation.tokens) + ROUNDING

    @property
    def is_multiple(self) -> bool:
        """Whether one list is so much a multiple of the other that no mean ratio tells more."""
        return abs(self.relation.nearest - 1) > slope.SLOPE_MARGIN and self.factor[1] < 1 - PROPORTIONAL


def _beyond_the_others(x: Float[Tensor, " N"], part: Bool[Tensor, " N"]) -> tuple[float, float, float]:
    """By how much the mean of a part is above that of the others, the deviation within both, and the error."""
    (mean, variance, n), (usual, usual_variance, others) = ((y.mean(), y.var(), len(y)) for y in (x[part], x[~part]))
    within = float((variance + usual_variance) / 2) ** 0.5
    return float(mean - usual), within, within * math.sqrt(1 / n + 1 / others)


def _is_level(rows: Table, name: str = "mass") -> bool:
    """Whether no bucket of a place has hardly any mismatch; buckets of few tokens do not count."""
    by_place = {float(row[name]): n for row in rows if (n := float(row["tokens"])) >= LEAST_TOKENS}
    return not by_place or min(by_place) >= LEVEL * sum(x * n for x, n in by_place.items()) / sum(by_place.values())


def _relation(sums: torch.Tensor) -> slope.Relation | None:
    return slope.relation(dict(zip(RELATED, sums.tolist(), strict=True)))


@dataclass(frozen=True)
class Cause:
    """One cause of a mismatch.

    symptom: what a report shows where the cause is at work.
    cause: what is wrong.
    fix: what to do.
    evidence: what was seen in a run, with the detector's numbers in braces.
    threshold: where the detector draws the line, and why there.
    explains: causes whose detectors fire too where this one is at work.
    hides: what may act on the same tokens without a sign of its own, in words.
    alike: whether low precision alone may show the sign, so that a small share of the mismatch does not count.
    """

    title: str
    symptom: str
    cause: str
    fix: str
    evidence: str
    threshold: str
    explains: Sequence[str] = ()
    hides: str = ""
    alike: bool = False


@dataclass(frozen=True)
class Finding:
    """A cause that a detector found, with the evidence.

    against: what speaks against it, beside its rivals.
    share: the share of the mismatch that it accounts for, from 0 to 1.
    also: other causes whose signs this one brings about, so that they are not told apart from it.
    """

    name: str
    cause: Cause
    evidence: str
    against: str
    share: float
    also: tuple[str, ...] = ()


def findings(facts: Facts) -> list[Finding]:
    """The causes that show, the best first, less causes whose signs a better one explains."""
    seen, shares, away = _seen(facts)
    weak = {name for name in seen if CAUSES[name].alike and shares[name] < LEAST_SHARE}
    able = {name: seen.keys() - weak - (OF_PLACES if name in away else set()) for name in seen}
    left = [name for name in seen if not any(_explains(other, name, shares) for other in able[name])]
    showing = set(left) - weak - UNMEASURED
    # Causes of places take their tokens out, and causes of all tokens are measured away from these places: both add up.
    rest = 1 - sum(max((shares[name] for name in part), default=0.0) for part in (showing & away, showing - away))
    if not OF_PLACES.isdisjoint(left) and facts.away.sums["usable"] >= FEW:
        rest = min(rest, facts.away.kl_k3 / max(facts.kl_k3, 1e-30))
    if WEIGHTS.isdisjoint(left) and (lower := _precision(facts, rest, left, shares, showing)):
        seen[PRECISION], shares[PRECISION] = lower, lower["share_of_all"]
        left.append(PRECISION)
    order = sorted(left, key=lambda name: (name in weak, name == PRECISION, -shares[name]))
    return [_finding(name, seen, shares, order) for name in order]


def _precision(
    facts: Facts, rest: float, left: Iterable[str], shares: Mapping[str, float], showing: Iterable[str]
) -> Numbers | None:
    """What is left of kl_k3 to an engine that errs everywhere, or to one of several engines that errs in a part."""
    even = facts.is_even or any(shares[name] > PART for name in LOCAL.intersection(left))
    part = None if even or not facts.is_split or {*OF_ALL} & {*showing} else facts.part
    kl_k3, line = (part or facts).kl_k3, (part or facts).line
    judged = line is not None and math.isfinite(line.error("slope"))
    if not (part or (even and judged)) or rest <= 0.5 or rest * kl_k3 <= LIMITS[FIRST].high:
        return None
    beside = ", and so may another setting of sampling" if {"temperature", "top-p"} & {*showing} or not judged else ""
    at, share = ("in each of the responses", facts.share(facts.heavy)) if part else ("everywhere", 1.0)
    kept = {"kl_k3": kl_k3, "rest": rest, "share_of_all": rest * share}
    return kept | {"beside": beside, "where": facts.where(facts.heavy) if part else "", "reach": at}


def _seen(facts: Facts) -> tuple[dict[str, Numbers], dict[str, float], set[str]]:
    """What detectors see, the share of each cause, and the causes that show away from those of places.

    Beside a cause of some tokens, one of all tokens is looked for among the others, where the former has no sign.
    Where some responses have most of the mismatch, one that they show alone counts.
    """
    seen = _detected(facts, DETECTORS)
    shares, places = _shares(seen), OF_PLACES & seen.keys()
    others = facts.away if places else facts.part
    showing = _detected(others, OF_ALL) if others and others.line else None
    if showing is None or not (places or showing):
        return seen, shares, set()
    if places:
        left = 1 - max(shares[name] for name in places)
    else:
        left = facts.share(facts.heavy)
        showing = {name: {**numbers, "where": facts.where(facts.heavy)} for name, numbers in showing.items()}
    shares |= {name: left * share for name, share in _shares(showing).items()}
    rest = {name: numbers for name, numbers in seen.items() if name not in OF_ALL}
    return rest | showing, shares, {*showing} if places else set()


def _detected(facts: Facts, names: Iterable[str]) -> dict[str, Numbers]:
    return {name: numbers for name in names if (numbers := DETECTORS[name](facts)) is not None}


def _shares(seen: Mapping[str, Numbers]) -> dict[str, float]:
    return {name: min(max(float(numbers.get("share_of_all", 1.0)), 0.0), 1.0) for name, numbers in seen.items()}


def _explains(name: str, other: str, shares: Mapping[str, float]) -> bool:
    """Whether a cause is large enough to explain another's sign; of two that explain each other, the larger does."""
    mutual = name in CAUSES[other].explains and shares[other] > shares[name]
    return other in CAUSES[name].explains and not mutual and shares[name] >= AS_LARGE * shares[other]


def _finding(name: str, seen: Mapping[str, Numbers], shares: Mapping[str, float], order: Sequence[str]) -> Finding:
    cause = CAUSES[name]
    also = tuple(other for other in cause.explains if other in seen)
    rest = 1 - shares[name]
    left = f"The cause leaves {rest:.0%} of the mismatch unexplained. " if rest > 0.005 else ""
    against = left + f"The cause may hide {cause.hides}. " * bool(cause.hides) + _rival(name, shares, order)
    evidence = seen[name].get("where", "") + cause.evidence.format(**seen[name])
    return Finding(name, cause, evidence, against, shares[name], also)


def _rival(name: str, shares: Mapping[str, float], order: Sequence[str]) -> str:
    """What speaks for the first other cause; where none shows, for the largest whose sign this one brings about."""
    others = [other for other in order if other != name]
    if others:
        return f"The rival, {CAUSES[others[0]].title.lower()}, accounts for {shares[others[0]]:.0%}."
    explained = max(shares.keys() - {name}, key=lambda other: (shares[other], other), default=None)
    if explained is None:
        return f"No sign of any of the {len(CAUSES) - 1} other causes shows."
    return f"The sign of another cause shows too ({CAUSES[explained].title.lower()}), and follows from this cause."


def _nonfinite(facts: Facts) -> Numbers | None:
    train, rollout = (facts.sums.get(f"nonfinite_{side}", 0.0) for side in ("train", "rollout"))
    named = (
        f"; {side}: "
        + ", ".join(f"{name} ({count})" for name, count in names.most_common(SHOWN))
        + f" and {len(names) - SHOWN} other numbers" * (len(names) > SHOWN)
        for side, names in facts.evidence.absent.items()
        if names
    )
    return {"train": train, "rollout": rollout, "named": "".join(named)} if train + rollout else None


def _broken_advantages(facts: Facts) -> Numbers | None:
    count = facts.evidence.broken_advantages
    return {"count": count} if count else None


def _placeholder(facts: Facts) -> Numbers | None:
    usable = max(facts.sums["usable"], 1)
    shown = {key: x.tolist() for key, x in facts.evidence.fills.items() if _is_fill(facts, *key, x.tolist(), usable)}
    phrases = (
        f"{n:.0f} ({n / usable:.2%}) have a {side} log-prob of exactly {number:g}"
        + ", while the other side finds them unlikely" * (number == 0)
        for (side, number), (n, _) in sorted(shown.items(), key=lambda item: -item[1][0])[:SHOWN]
    )
    mass = sum(part for _, part in shown.values())
    return {"told": "; ".join(phrases), "share_of_all": mass / facts.mass} if shown else None


def _is_fill(facts: Facts, side: str, number: float, sums: Sequence[float], usable: float) -> bool:
    count, total = sums
    octave = math.frexp(number)[1]
    near = sum(facts.evidence.apart[side, place] for place in range(octave - 1, octave + 2)) if number else count
    return count >= max(FILLS if number else 3, SURE_SHARE * usable, near / 2) and not (
        number == 0 and _left_alone(facts, total / count)
    )


def _left_alone(facts: Facts, mean: float) -> bool:
    """Whether a deep cut left tokens of log-prob 0, of this mean `mass`, alone in their nucleus."""
    line = facts.line
    return line is not None and line.relation.mean_ratio < CUT_DEEP and mean < CUT_MASS and _cut_off(line) is not None


def _pairing(facts: Facts, of_all: bool) -> Numbers | None:
    """Lists of different tokens: a shift restores them, or most responses have them. Else a response was changed."""
    pairing = facts.pairing
    if pairing is None or of_all != bool(pairing.shift or pairing.broken > pairing.of / 2):
        return None
    return {"found": pairing, "share_of_all": facts.share(facts.broken)}


def _of_part(facts: Facts, part: str, factor: float) -> Numbers | None:
    """Moments of the responses where the |log r| of a part stands out from that of their middle."""
    moments = facts.evidence.moments
    excess, largest, chance = (moments[f"{part}_{name}"] for name in ("excess", "largest", "chance"))
    of_most = excess.count >= LEAST_SEQUENCES and excess.mean > STANDARD_ERRORS * excess.error
    of_some = float(torch.special.gammainc(*torch.tensor([largest.total, chance.total]).double())) < RARE
    shows = moments[part].mean >= factor * moments["middle"].mean and (of_most or of_some)
    return {**moments, "share_of_all": _share_of(facts, part)} if shows else None


def _are_lowered(facts: Facts) -> bool:
    """Whether the engine's likely tokens are likelier to the trainer, as a temperature above 1 alone makes them."""
    likely = torch.tensor([label in SHARES[3:] for label in SHARES])
    tokens = facts.tables.means("probability", likely)["tokens"]
    return tokens >= LEAST_TOKENS and -facts.tables.errors("probability", likely) > ERRORS_BESIDE


def _unit(line: Line) -> Numbers | None:
    """A factor that is a logarithm's base, or that no temperature reaches; a temperature leaves more, for its mass."""
    if not line.is_multiple:
        return None
    factor, left = line.factor
    size = abs(math.log(factor))
    of_unit = size > math.log(MOST_FACTOR) or any(abs(size - unit) < line.factor_margin for unit in UNITS)
    return {"factor": factor, "left": left} if left < LEFT and of_unit else None


def _swapped(line: Line) -> Numbers | None:
    """Tokens that the trainer's column sampled: the mean of mu / pi_old is 1, and that of pi_old / mu is not."""
    mean = line.relation.mean_log_ratio
    if mean < NEGATIVE_KL or line.is_scaled or line.facts.spread["responses"] < EVEN["responses"]:
        return None
    folds = line.facts.evidence.folds
    n, sums = folds[0], folds[-1]
    inverse = sums.sum() / n.sum()
    error = float((sums - inverse * n).square().sum().sqrt() / n.sum())
    off = abs(float(inverse) - 1)
    sampled = off <= max(slope.RATIO_MARGIN, STANDARD_ERRORS * error) and off < mean / 2
    above = mean > ERRORS_BESIDE * line.error("mean_log_ratio")
    return {"found": line.relation, "inverse": float(inverse), "error": error} if above and sampled else None


def _raw(line: Line) -> Numbers | None:
    relation, scaled = line.relation, line.is_scaled
    if line.off_one <= 0 or (scaled and line.is_multiple):
        return None
    scale = f"; the slope of log pi_old on log mu is {relation.slope:.3f}" if scaled else ""
    return {"found": relation, "scale": scale, "share_of_all": (relation.mean_ratio - 1) / max(line.facts.kl_k3, 1e-30)}


def _temperature(line: Line) -> Numbers | None:
    if not line.is_scaled or (line.off_one > 0 and not line.is_multiple):
        return None
    means = line.facts.means
    left = line.relation.unexplained * (means["proximal_squared"] - means["proximal"] ** 2)  # of (log r)^2, by a line
    return {"found": line.relation, "share_of_all": 1 - left / line.facts.square}


def _cut_off(line: Line) -> Numbers | None:
    facts, relation, mean = line.facts, line.relation, line.relation.mean_log_ratio
    if line.off_one >= 0 or line.is_multiple:
        return None
    even = abs(math.log(relation.mean_ratio) - mean) <= max(0.2, -0.3 * mean) and mean <= 0
    even &= facts.spread["tokens"] >= EVEN["tokens"] and _is_level(facts.places.get("position", ()), "kl_k1")
    return {"found": relation, "share_of_all": mean**2 / facts.square} if even else None


def _other_weights(facts: Facts) -> Numbers | None:
    if facts.sums["usable"] < LEAST_TOKENS:
        return None
    if facts.mean > -slope.UNLIKELY:
        return _other_weights_of_part(facts)
    line = facts.line
    if line and (line.is_multiple or line.is_flat or line.off_one < 0):
        return None
    return {"mean": facts.mean, "share_of_all": 1 - max(_share_of(facts, part) for part in ("beginning", "end"))}


def _other_weights_of_part(facts: Facts) -> Numbers | None:
    """Other weights of one engine of several: changed responses, whose tokens the trainer finds unlikely."""
    part, changed = facts.within(facts.broken), _pairing(facts, of_all=False)
    if not changed or facts.broken.sum() < SPLIT or part.sums["usable"] < LEAST_TOKENS or part.mean > -slope.UNLIKELY:
        return None
    return {"mean": part.mean, "where": facts.where(facts.broken), "share_of_all": changed["share_of_all"]}


def _share_of(facts: Facts, part: str) -> float:
    """The share of the mismatch that a part of the responses has beyond their middle."""
    moments = facts.evidence.moments
    return moments[f"{part}_mass"].total / max(moments["mass"].total, 1e-30)


def _of_bucket(facts: Facts, place: str, usual: str, factor: float, least: int = 1) -> Numbers | None:
    """A bucket beyond which `mass` is higher by a factor, and |log r| by `ERRORS_BESIDE`: one token moves k3."""
    if place not in facts.places:
        return None
    beyond = torch.tensor([label != usual for label in PLACES[place].labels])
    low, high = (facts.tables.means(place, part) for part in (~beyond, beyond))
    is_higher = high["tokens"] >= FEW and low["tokens"] >= least and high["mass"] >= max(factor * low["mass"], 1e-30)
    if not is_higher or facts.tables.errors(place, beyond, ~beyond) < ERRORS_BESIDE:
        return None
    share = high["tokens"] / (low["tokens"] + high["tokens"])
    explained = 1 - low["mass"] / (low["mass"] * (1 - share) + high["mass"] * share)
    return {"usual": low["kl_k3"], "others": high["kl_k3"], "share": share, "share_of_all": explained}


def _jump(facts: Facts) -> Numbers | None:
    """The first sudden change, up or from beyond the limit down, that more than one response of its level shows."""
    sudden = (place for place, change in enumerate(facts.changes) if change.sudden and change.apart)
    fits = (facts.changes[place] for place in sudden if _counts(facts, place) and _of_several(facts, place, place + 1))
    return _of_change(facts, next(fits, None))


def _counts(facts: Facts, place: int) -> bool:
    """Whether a change is large, and leads beyond the limit of kl_k3 or from there, or rises between lasting levels."""
    change = facts.changes[place]
    if max(change.factor, 1 / change.factor) < JUMP_FACTOR:
        return False
    steps = [len(level[0].unique()) for level in facts.levels]
    lasts = min(steps[place : place + 2]) >= SIDE or sum(steps) < 2 * SIDE
    return max(change.before, change.after) > LIMITS[FIRST].high or (lasts and change.factor > 1)


def _rise(facts: Facts) -> Numbers | None:
    """A rise that no single step is to blame for; over several levels it is told as one."""
    if _jump(facts) or not facts.changes:
        return None
    first, last = facts.changes[0], facts.changes[-1]
    whole = Change(last.step, first.before, last.after, sudden=False)
    counts = whole.after > LIMITS[FIRST].high or not first.sudden or _counts(facts, 0)
    rises = counts and whole.factor >= JUMP_FACTOR and _of_several(facts, 0, len(facts.changes))
    return _of_change(facts, whole if rises else None)


def _of_change(facts: Facts, change: Change | None) -> Numbers | None:
    if change is None:
        return None
    usual = _mean(facts.levels[0 if facts.changes[0].factor > 1 else 1])
    return {"change": change, "share_of_all": 1 - float(usual * facts.rows[1].sum()) / facts.mass}


def _mean(rows: torch.Tensor) -> torch.Tensor:
    """The mean of `mass` over the usable tokens of responses."""
    return rows[2].sum() / rows[1].sum().clamp(min=1)


def _of_several(facts: Facts, first: int, last: int) -> bool:
    """Whether the higher of two levels stays above the lower one without its heaviest response.

    Few steps do not tell their own noise: there the responses of both levels must differ by more than their spread.
    """
    low, high = facts.levels[first], facts.levels[last]
    if facts.changes[first].before > facts.changes[last - 1].after:
        low, high = high, low
    lighter = torch.arange(high.shape[1]) != high[2].argmax()
    several = bool(_mean(high[:, lighter]) > math.sqrt(JUMP_FACTOR) * _mean(low))
    return several and (len(facts.rows[0].unique()) >= 2 * SIDE or _differ_by_responses(low, high))


def _differ_by_responses(low: Float[Tensor, "3 _"], high: Float[Tensor, "3 _"]) -> bool:
    """Whether the responses of one level have a larger mismatch a token than those of another."""
    rows = torch.cat([low, high], 1)
    part, held = torch.arange(rows.shape[1]) >= low.shape[1], rows[1] > 0
    apart, _, error = _beyond_the_others((rows[2] / rows[1]).clamp(min=1e-30).log()[held], part[held])
    return as_normal(apart / max(error, 1e-30), int(held.sum()) - 2) > ERRORS_BESIDE


def _differing_weights(facts: Facts) -> Numbers | None:
    share, errors = id_share(facts.evidence.by_id)
    shown = share >= ID_SHARE + ID_SHARE_OF_K3 * facts.kl_k3 and errors >= STANDARD_ERRORS
    return {"share": share, "errors": errors, "share_of_all": share} if shown else None


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


def _less_own_variance(count: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of residuals and of their squares for each id, less a line in the variance within the id."""
    variance = (squares - total.square() / count) / (count - 1)
    centred = variance - (variance * count).sum() / count.sum()
    spread = (count * centred.square()).sum()
    moved = centred * ((total * centred).sum() / spread if spread > 0 else 0.0)
    return total - moved * count, squares - 2 * moved * total + count * moved.square()


def _of_line(detector: Callable[[Line], Numbers | None]) -> Callable[[Facts], Numbers | None]:
    """A detector that has nothing to say where tokens are too few for a `Line`."""
    return lambda facts: detector(facts.line) if facts.line else None


DETECTORS: dict[str, Callable[[Facts], Numbers | None]] = {
    "non-finite": _nonfinite,
    "non-finite-advantage": _broken_advantages,
    "placeholder": _placeholder,
    "different-tokens": partial(_pairing, of_all=True),
    "changed-response": partial(_pairing, of_all=False),
    "swapped": _of_line(_swapped),
    "end-token": partial(_of_part, part="end", factor=END_FACTOR),
    "template": partial(_of_part, part="beginning", factor=BEGINNING_FACTOR),
    "unit": _of_line(_unit),
    "raw-log-probs": _of_line(_raw),
    "temperature": _of_line(_temperature),
    "top-p": _of_line(_cut_off),
    "other-weights": _other_weights,
    "stale-weights": partial(_of_bucket, place="age", usual="0", factor=AGE_FACTOR, least=LEAST_TOKENS),
    "jump": _jump,
    "rise": _rise,
    "differing-weights": _differing_weights,
    "route": partial(_of_bucket, place="route", usual="same", factor=ROUTE_FACTOR),
}
WORDS = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text("utf-8"))
CANNOT: str = WORDS.pop("cannot-tell")
CAUSES = {name: Cause(**words) for name, words in WORDS.items()}
