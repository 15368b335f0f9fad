"""Which config to propose, and why: candidates that lose too much or lean to one side are out, the rest are ranked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mis_plugins.config import writing
from mis_plugins.explain.rungs import record
from mis_plugins.explain.words import flags
from mis_plugins.report.numbers import FIRST
from mis_plugins.report.survey import Opening
from mis_plugins.report.sweep import Candidate

# kl_k3 below which no config changes the gradient in any visible way; an engine in bf16 lies above ten times it.
NOTHING_TO_DO = 1e-4
LEAST_KEPT = 0.5
# Noise averages out over steps and a wrong direction adds up: only ten times the noise puts a candidate out.
LEAST_ESS = 0.1
LENGTH_LEAN, SIGN_LEAN = 0.8, 0.05
SLOWEST, SLOW, FASTEST = 0.25, 0.8, 1.25  # mean weights, which act as a factor on the learning rate
# Weights up to 1 bring back the share of the trainer's policy that both policies sample. The rest depends on
# weights above 1 and on responses never seen. Where the share is below one half, the rest can lose more than
# the share gains.
LEAST_OVERLAP = 0.5
MEASURES = {
    "response_cosine": "cosine to the products of whole responses",
    "coefficient_cosine": "coefficient cosine",
    "ess": "effective sample",
}
ALIKE = 0.005  # directions closer than this are not told apart: the simpler config wins


@dataclass(frozen=True)
class Judged:
    """A candidate with its numbers, and why it is out; no reason where it is in."""

    candidate: Candidate
    numbers: Mapping[str, Any]
    reasons: tuple[str, ...]

    @property
    def measure(self) -> str:
        """The number that candidates are ranked by: the first of `MEASURES` that the data give."""
        return next(name for name in MEASURES if name in self.numbers)

    @property
    def direction(self) -> float:
        return self.numbers[self.measure]

    @property
    def cosine(self) -> float | None:
        """The cosine that ranks; None without advantages."""
        return None if self.measure == "ess" else self.direction

    @property
    def parts(self) -> int:
        """How many things the config does: weight, its normalization, and each rule."""
        config, weight = self.candidate.config, self.candidate.config.weight
        return len(config.reject) + (0 if weight is None else 1 + (weight.normalize is not None))


@dataclass(frozen=True)
class Proposal:
    """The config to run with, in the words and files that a user needs.

    trusted: whether any config is trusted; otherwise `name` only ranks first.
    """

    name: str
    trusted: bool
    why: tuple[str, ...]
    yaml: str
    flags: str
    ranking: tuple[Judged, ...]


def judge(candidate: Candidate, numbers: Mapping[str, Any]) -> Judged:
    """Say what speaks against a candidate."""
    return Judged(candidate, numbers, tuple(_against(numbers)))


def _against(numbers: Mapping[str, Any]) -> Iterator[str]:
    kept, ess, mean = numbers["kept_fraction"], numbers["ess"], numbers["applied_mean"]
    if kept < LEAST_KEPT:
        yield f"keeps {kept:.0%} of the tokens, less than {LEAST_KEPT:.0%}"
    if ess < LEAST_ESS:
        yield f"has an effective sample of {ess:.0%}, less than {LEAST_ESS:.0%}"
    if kept and not SLOWEST <= mean <= FASTEST:
        yield f"has a mean weight of {mean:.2g}, which changes the learning rate"
    low, high = (choose(numbers["kept_by_usual_length"].values(), default=0.0) for choose in (min, max))
    if low < LENGTH_LEAN * high:
        yield f"keeps {low:.0%} of one length and {high:.0%} of another"
    signs = numbers["kept_by_advantage"]
    lean = signs["positive"] - signs["negative"] if {"positive", "negative"} <= signs.keys() else 0.0
    if abs(lean) > SIGN_LEAN:
        yield f"keeps {abs(lean):.0%} more of {'positive' if lean > 0 else 'negative'} advantages"


def propose(
    candidates: Sequence[Candidate],
    outcomes: Mapping[str, Mapping[str, Any]],
    whole: Mapping[str, float],
    opening: Opening | None,
) -> Proposal | None:
    """The best candidate; None where nothing was swept."""
    judged = [judge(one, outcomes[one.name]) for one in candidates if one.name in outcomes]
    if not judged:
        return None
    ranking = sorted(judged, key=lambda one: (len(one.reasons), -one.direction, one.parts))
    best = [one for one in ranking if not one.reasons]
    none = next((one for one in judged if not one.candidate.config.corrects), None)
    if none is not None and whole.get(FIRST, 1.0) < NOTHING_TO_DO:
        why = f"kl_k3 is {whole[FIRST]:.2g}: below {NOTHING_TO_DO:g} no correction changes a gradient that is seen"
        return _proposal(none, (why,), ranking)
    if not best:
        out = f"every candidate is out; the least unfit one {'; '.join(ranking[0].reasons)}"
        advice = "lower the mismatch first: no config repairs it"
        return _proposal(ranking[0], (out, advice), ranking, trusted=False)
    alike = [one for one in best if one.direction > best[0].direction - ALIKE]
    chosen = min(alike, key=lambda one: (not one.candidate.config.corrects, one.parts, -one.direction))
    why = tuple(_why(chosen, len(alike) - 1, none))
    if distrust := _distrust(opening):
        first = f"with a closer engine try {chosen.candidate.name}, which ranks first here"
        return _proposal(chosen, (distrust, first, *why), ranking, trusted=False)
    return _proposal(chosen, (*why, *_doubts(whole)), ranking)


def _proposal(
    chosen: Judged, why: tuple[str, ...], ranking: Sequence[Judged], trusted: bool = True
) -> Proposal:
    config = chosen.candidate.config
    text = writing.to_yaml(writing.as_mapping(config))
    words = f"{flags(config)} --custom-config-path mis.yaml"
    return Proposal(chosen.candidate.name, trusted, why, text, words, tuple(ranking))


# The words of a proposal.


def _why(chosen: Judged, alike: int, none: Judged | None) -> Iterator[str]:
    numbers = chosen.numbers
    yield f"{numbers['kept_fraction']:.1%} of the tokens are kept, with an effective sample of {numbers['ess']:.0%}"
    without = "" if none is None or none is chosen else f", and {none.direction:.3f} without correction"
    yield f"the {MEASURES[chosen.measure]} is {chosen.direction:.3f}{without}"
    if numbers["applied_mean"] < SLOW:
        yield f"a mean weight of {numbers['applied_mean']:.2g} acts as that factor on the learning rate"
    if alike:
        others = "1 other is" if alike == 1 else f"{alike} others are"
        yield f"{others} as good to {ALIKE:g}, and no other has fewer parts"


def _distrust(opening: Opening | None) -> str | None:
    """Why no config is trusted; None where one is.

    Long responses have little in common under any mismatch, and corrections help there nonetheless: the share
    counts only where the mismatch is larger than any that was measured with the real model.
    """
    worst = record().steps[-1]
    if opening is None or opening.response_overlap >= LEAST_OVERLAP or opening.kl_k3 <= worst.k3:
        return None
    steps = f"in the first {opening.steps} of {opening.of} steps" if opening.of > 1 else "in this step"
    return (
        f"no config is trusted: {steps} both policies share {opening.response_overlap:.0%} of what they write, less "
        f"than {LEAST_OVERLAP:.0%}, and kl_k3 is {opening.kl_k3:.2g}, more than a real model shows with an engine in "
        f"{worst.name}; give the engine more bits, or newer weights, and report again"
    )


def _doubts(whole: Mapping[str, float]) -> tuple[str, ...]:
    worst = record().steps[-1]
    if whole.get(FIRST, 0.0) <= worst.k3:
        return ()
    return (
        f"lower the mismatch too: kl_k3 is above what a real model shows with an engine in {worst.name}, and some runs "
        "like this collapse with every config",
    )
