"""The part of the mismatch that a wheel carries: `mis_plugins/explain/rungs.json`, which `config check` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from lab.ladder.rungs import RUNGS
from mis_plugins.shared.files import replaced

CARRIED = {"ratio": ("mean", "min", "max"), "k3": ("mean", "max"), "binary_kl": ("mean",), "abs_prob_diff": ("mean",)}
"""The statistics of whole sequences that a preset bounds, and how they are aggregated."""
LARGEST = 20  # the most values of a statistic that are carried: order statistics, which stand for all
SAMPLED_AS_TRAINED = "bf16"  # the trainer whose numbers are carried


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the part of a json's content that is carried, a line for each rung."""
    found = shipped(content)
    rungs = ",\n".join(json.dumps(rung, separators=(",", ":")) for rung in found.pop("rungs"))
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    with replaced(path) as partial:
        partial.write_text(f'{{{head}, "rungs": [\n{rungs}\n]}}\n', encoding="utf-8")


def shipped(content: Mapping[str, Any]) -> dict[str, Any]:
    """Model, commits and rungs: of the finest step all lengths, of each other step the longest."""
    rungs = by_k3(content["rungs"])
    finest = next((name for name in rungs if RUNGS[name].step), None)
    longest = max(set.intersection(*({*map(int, rung["responses"])} for rung in rungs.values())), default=0)
    made = []
    for name, rung in rungs.items():
        lengths = rung["responses"] if name == finest else [str(longest)] * RUNGS[name].step
        made.append(_rung(name, rung, [length for length in lengths if length in rung["responses"]]))
    return {"model": content["model"], "commits": commits(content["rungs"].values()), "rungs": made}


def by_k3(rungs: Mapping[str, Any]) -> dict[str, Any]:
    """The rungs by name, the finest first."""
    return dict(sorted(rungs.items(), key=lambda pair: pair[1]["mismatch"][SAMPLED_AS_TRAINED]["k3"][0]))


def commits(made: Iterable[Mapping[str, Any]]) -> str:
    """The commits of this repository that rungs, or the words of rollouts, name; each once."""
    return ", ".join(dict.fromkeys(commit for one in made for commit in one["commit"].split(", ")))


def fits(values: Mapping[str, Any]) -> tuple[float, float]:
    """A window of `(prod r)^(1/n)` that keeps nine of ten responses: its percentiles 5 and 95."""
    low, *_, high = quantiles(values["ratio"]["mean"], n=20, method="inclusive")
    return _digits(math.exp(low), 6), _digits(math.exp(high), 6)


def _rung(name: str, rung: Mapping[str, Any], lengths: Sequence[str]) -> dict[str, Any]:
    numbers = rung["mismatch"][SAMPLED_AS_TRAINED]
    told = {"name": name, "words": RUNGS[name].words, "step": RUNGS[name].step}
    told |= {key: _digits(numbers[key][0], 4) for key in ("k3", "p99")}
    told |= {key: numbers[key] for key in ("tokens", "prompts")}
    return told | {"by_length": {length: _length(rung, length) for length in lengths}}


def _length(rung: Mapping[str, Any], length: str) -> dict[str, Any]:
    measured = rung["windows"][length]
    values = {
        statistic: {over: _thinned(measured[statistic][over]) for over in overs} for statistic, overs in CARRIED.items()
    }
    return {"count": rung["responses"][length], "values": values}


def _thinned(values: Sequence[float]) -> list[float]:
    """Values in order, of many the evenly spaced ones, with four digits."""
    ordered, kept = sorted(values), min(LARGEST, len(values))
    return [_digits(ordered[int((place + 0.5) * len(ordered) / kept)], 4) for place in range(kept)]


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
