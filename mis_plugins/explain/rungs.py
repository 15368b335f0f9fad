"""What a config keeps of the rollouts of a real model at each rung, a precision of the rollout engine.

`lab/mismatch.py` measures the rungs and writes `rungs.json`, which a wheel carries. Nothing here needs torch.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mis_plugins.config.model import LEVEL_OVER, CorrectionConfig, Over
from mis_plugins.explain.words import holds

FILE = Path(__file__).parent / "rungs.json"
FEW = 0.5  # share of the sequences; a window that keeps less gets a warning
Values = Mapping[str, Mapping[str, list[float]]]


@dataclass(frozen=True)
class Responses:
    """Responses of one length.

    count: how many of them were measured.
    values: by statistic, then by mean, min or max, in order: what a rule over sequences compares. At most
        twenty order statistics stand for all responses.
    """

    length: int
    count: int
    values: Values = field(repr=False)


@dataclass(frozen=True)
class Rung:
    """One precision of the engine.

    name: what `lab/mismatch.py --rungs` calls it.
    words: the rung for a reader.
    step: whether the rung differs from the others in its weights; bf16 with another LM head or engine
        does not.
    k3, p99: the mean k3 of a token, and the percentile 99 of |log r|.
    by_length: responses of each length at the finest step, of the longest at the other steps, none elsewhere.
    """

    name: str
    words: str
    step: bool
    k3: float
    p99: float
    tokens: int
    prompts: int
    by_length: Mapping[int, Responses]

    @property
    def said(self) -> str:
        """The rung within a sentence."""
        article = "an" if self.name[0] in "fi" else "a"  # as fp8 and int5 are spoken
        return f"{article} {self.name} engine's mismatch (k3 {short(self.k3)})"


@dataclass(frozen=True)
class Record:
    """The rungs of one model, the finest first.

    commits: the commits of this repository that sampled.
    """

    model: str
    commits: str
    rungs: tuple[Rung, ...]

    @property
    def steps(self) -> tuple[Rung, ...]:
        """The ladder of precisions: the rungs without the variants of bf16."""
        return tuple(rung for rung in self.rungs if rung.step)


@dataclass(frozen=True)
class Window:
    """Bounds on a number of a whole sequence; a sequence outside is dropped, or weighs nothing.

    key: the key of the config.
    limits: bounds on the value that is compared: for ratios their logarithm.
    """

    key: str
    statistic: str
    over: Over
    limits: tuple[float | None, float | None]

    def keeps(self, responses: Responses) -> float | None:
        """The share of the responses that lie within; None where this number of a response was not measured."""
        over, factor = ("mean", responses.length) if self.over == "sum" else (self.over, 1)
        values = [factor * value for value in responses.values.get(self.statistic, {}).get(over, ())]
        if not values:
            return None
        low, high = self.limits
        return sum(holds(low, value, high) for value in values) / len(values)


def windows(config: CorrectionConfig) -> Iterator[Window]:
    """Windows over whole sequences that judge all their tokens, whatever another rule has dropped."""
    for index, rule in enumerate(config.reject):
        if rule.over != "token" and config.population(rule) == "valid":
            yield Window(f"reject[{index}]", rule.statistic, rule.over, rule.limits)
    weight = config.weight
    if weight and weight.level != "token" and not weight.record.weighs_outside:
        limits = (math.log(weight.floor) if weight.floor else None), math.log(weight.ceiling)
        yield Window(f"weight.bound: {weight.bound}", "ratio", LEVEL_OVER[weight.level], limits)


def warnings(config: CorrectionConfig) -> Iterator[str]:
    """Warnings about windows that keep few sequences: of the longest at some rung, or of short ones at the finest."""
    measured = record()
    finest = measured.steps[0]
    *shorter, longest = sorted(finest.by_length)
    for window in windows(config):
        by_rung = {f"at {rung.said}": rung.by_length[longest] for rung in measured.steps}
        yield from _few(window, f"of sequences of {longest} tokens", by_rung)
        by_length = {f"of sequences of {length} tokens": finest.by_length[length] for length in shorter}
        if not _is_few(window, finest.by_length[longest]):
            yield from _few(window, f"at {finest.said}", by_length)


def _few(window: Window, where: str, measured: Mapping[str, Responses]) -> Iterator[str]:
    """A warning with the share that the window keeps of responses of each name, where the share is small."""
    few = {name: responses for name, responses in measured.items() if _is_few(window, responses)}
    if few:
        shares = ", ".join(f"{window.keeps(responses):.0%} {name}" for name, responses in few.items())
        least = min(responses.count for responses in few.values())
        yield (
            f"{window.key} keeps, {where}, {shares}; measured on {least} responses or more of {record().model} "
            "(docs/presets.md)"
        )


def _is_few(window: Window, responses: Responses) -> bool:
    share = window.keeps(responses)
    return share is not None and share < FEW


@cache
def record() -> Record:
    """The committed record."""
    return read(FILE)


def read(file: Path) -> Record:
    """The record that a file holds."""
    held = json.loads(file.read_text(encoding="utf-8"))
    for rung in held["rungs"]:
        rung["by_length"] = {int(n): Responses(int(n), **measured) for n, measured in rung["by_length"].items()}
    return Record(held["model"], held["commits"], tuple(Rung(**rung) for rung in held["rungs"]))


def short(value: float) -> str:
    """A positive number with one digit: 6e-3, 0.1."""
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.1 else f"{value:.1g}"
