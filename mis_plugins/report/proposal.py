"""Which config to propose, and why: candidates that lose too much or lean to one side are out, the rest are ranked."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, pvariance
from typing import Any

from mis_plugins.config import writing
from mis_plugins.explain.limits import FIRST, ROWS, UNBIASED, Row, row
from mis_plugins.explain.words import flags
from mis_plugins.report.sweep import Candidate, essence, load

NOTHING = "nothing"  # the name of a proposal to a calm run
NO_ADVANTAGES = (
    "configs are not ranked by gradient without advantages: write the column `advantages`, not all 0, and report again"
)
SHOWN = 6  # configs that are as good
LEAST_KEPT = 0.5
# Noise averages out over steps and a wrong direction adds up: only ten times the noise puts a candidate out.
LEAST_ESS = 0.1
LENGTH_LEAN, SIGN_LEAN = 0.8, 0.05
SLOWEST, SLOW, FASTEST = 0.25, 0.8, 1.25  # mean weights, which act as a factor on the learning rate
OPENING = 0.1  # share of the steps, the first ones, which a run that starts anew meets whatever its config
MEASURES = {
    "response_cosine": "cosine to the products of whole responses",
    "coefficient_cosine": "coefficient cosine (too few responses bear products of whole ones)",
    "ess": "effective sample",
}
ALIKE = 0.005  # directions closer than this are not told apart, whatever their interval


@dataclass(frozen=True)
class Judged:
    """A candidate with its numbers."""

    candidate: Candidate
    numbers: Mapping[str, Any]

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the candidate is out; none where it is in."""
        return tuple(_against(self.numbers))

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
    steps: Mapping[int, Mapping[str, float]],
    length: float = math.inf,
    calm: bool = False,
) -> Proposal | None:
    """README's row for the mismatch, or a candidate that is better beyond its interval; None where nothing was swept.

    length: mean number of tokens of a response.
    """
    judged = [Judged(candidate, outcomes[candidate.name]) for candidate in candidates if candidate.name in outcomes]
    if not judged:
        return None
    ranking = sorted(
        judged, key=lambda rival: (len(rival.reasons), -rival.direction, rival.parts, rival.candidate.name != "tis")
    )
    kl_k3 = whole[FIRST]
    readme_row = row(kl_k3)
    beyond = _beyond_all_rows(kl_k3, steps)
    if calm:
        why = f"kl_k3 is {kl_k3:.2g}, and README's row corrects nothing below {ROWS[0].below:g}"
        return _proposal(Candidate(NOTHING, _preset("metrics-only").config), (why,), ranking)
    if readme_row is None or beyond:
        good = (rival.candidate for rival in ranking if not rival.reasons and rival.cosine is not None)
        chosen = next(good, None) or _preset(ROWS[-1].preset)
        return _proposal(chosen, (beyond, f"with a closer engine try {chosen.name}"), ranking, trusted=False)
    named = next((rival for rival in ranking if _is_of(rival.candidate, readme_row.preset)), None)
    if named is None or named.cosine is None:
        lacking = NO_ADVANTAGES if ranking[0].cosine is None else ""
        chosen, why = _preset(readme_row.preset), [_by_row(readme_row, kl_k3, length), lacking]
    else:
        chosen, why = _ranked(named, ranking, _by_row(readme_row, kl_k3, length))
    if named is not None and named.reasons and chosen.name == named.candidate.name:
        why.append(f"against it: {'; '.join(named.reasons)}")
    return _proposal(chosen, tuple(filter(None, why)), ranking)


def _preset(name: str) -> Candidate:
    return Candidate(name, load(name))


def _is_of(candidate: Candidate, preset: str) -> bool:
    """Whether a candidate is a preset under whatever name; `metrics-only` is a run without correction."""
    config, wanted = candidate.config, _preset(preset).config
    return essence(config) == essence(wanted) or not (config.corrects or wanted.corrects)


def _ranked(named: Judged, ranking: Sequence[Judged], by_row: str) -> tuple[Candidate, list[str]]:
    """README's row, unless another candidate's cosine is above the row's by more than its interval; and why."""
    rivals = [rival for rival in ranking if not rival.reasons and rival.measure == named.measure and rival is not named]
    gains = {rival.candidate.name: (rival.direction - named.direction, _interval(rival, named)) for rival in rivals}
    reasons = [*_why(named, next((rival for rival in ranking if not rival.candidate.config.corrects), None)), by_row]
    best = next(iter(rivals), None)
    if best is not None:
        gain, interval = gains[best.candidate.name]
        if gain > max(interval, ALIKE):
            more = f"{best.candidate.name} has {best.direction:.3f}, {gain:.3f} +- {interval:.3f} more"
            words = f"the row has {named.direction:.3f}, {more}, and so is proposed in its place"
            return best.candidate, [by_row, words, *_why(best, None)]
    alike = [name for name, (gain, interval) in gains.items() if abs(gain) <= max(interval, ALIKE)]
    if alike:
        reasons.append(f"as good within the interval: {', '.join(sorted(alike, key=lambda x: x != 'tis')[:SHOWN])}")
    return named.candidate if named.candidate.config.corrects else _preset("metrics-only"), reasons


def _interval(first: Judged, second: Judged) -> float:
    """Two standard errors of the difference of two cosines: each part of the responses is left out in turn."""
    without = f"{first.measure}_without"
    pairs = zip(first.numbers.get(without, ()), second.numbers.get(without, ()), strict=True)
    gains = [a - b for a, b in pairs]
    return 2 * math.sqrt((len(gains) - 1) * pvariance(gains)) if len(gains) > 1 else 0.0


def _proposal(chosen: Candidate, why: tuple[str, ...], ranking: Sequence[Judged], trusted: bool = True) -> Proposal:
    config = chosen.config
    text = writing.to_yaml(writing.as_mapping(config))
    words = f"{flags(config)} --custom-config-path mis.yaml"
    return Proposal(chosen.name, trusted, why, text, words, tuple(ranking))


# The words of a proposal.


def _beyond_all_rows(kl_k3: float, steps: Mapping[int, Mapping[str, float]]) -> str:
    """Why the engine comes first: README has no row for the kl_k3 of the run or of its opening; else empty."""
    finite = [x for _, values in sorted(steps.items()) if math.isfinite(x := values.get(FIRST, math.nan))]
    opening = fmean(finite[: math.ceil(OPENING * len(finite))] or [0.0])
    for name, x in (("", kl_k3), (f" of the first {OPENING:.0%} of the steps", opening)):
        if row(x) is None:
            most = ROWS[-1].below
            return f"repair the engine first: kl_k3{name} is {x:.2g}, above {most:g}, where README has no row"
    return ""


def _by_row(readme_row: Row, kl_k3: float, length: float) -> str:
    """README's row in words, with what it says of the length."""
    sentence = f"README's row for kl_k3 {kl_k3:.2g} is `{readme_row.preset}`"
    if readme_row is ROWS[0]:
        sentence += " while rewards hold, and `tis` where they fall: mend a cause that is named first"
    if kl_k3 * length < UNBIASED:
        sentence += f"; at {length:.0f} tokens a response `sequence` is the row where no bias is wanted"
    return sentence


def _why(chosen: Judged, none: Judged | None) -> Iterator[str]:
    numbers = chosen.numbers
    yield f"{numbers['kept_fraction']:.1%} of the tokens are kept, with an effective sample of {numbers['ess']:.0%}"
    without = "" if none is None or none is chosen else f", and {none.direction:.3f} without correction"
    yield f"the {MEASURES[chosen.measure]} is {chosen.direction:.3f}{without}"
    if numbers["applied_mean"] < SLOW:
        yield f"a mean weight of {numbers['applied_mean']:.2g} acts as that factor on the learning rate"
