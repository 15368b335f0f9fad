"""The part of the mismatch that a wheel carries: `mis_plugins/explain/rungs.json`, which `config check` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.ladder.rungs import RUNGS
from mis_plugins.shared.files import replaced

LARGEST = 64  # the most responses of a length that are carried
SAMPLED_AS_TRAINED = "bf16"  # the trainer whose numbers are carried


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the part of a json's content that is carried, a line for each rung."""
    found = shipped(content)
    rungs = ",\n".join(json.dumps(rung, separators=(",", ":")) for rung in found.pop("rungs"))
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    with replaced(path) as partial:
        partial.write_text(f'{{{head}, "rungs": [\n{rungs}\n]}}\n', encoding="utf-8")


def shipped(content: Mapping[str, Any]) -> dict[str, Any]:
    """Model, commits and rungs, with four digits of each number."""
    found = content["rungs"]
    commits = dict.fromkeys(commit for one in found.values() for commit in one["commit"].split(", "))
    rungs = sorted((_rung(name, one) for name, one in found.items()), key=lambda rung: rung["k3"])
    return {"model": content["model"], "commits": ", ".join(commits), "rungs": rungs}


def _rung(name: str, one: Mapping[str, Any]) -> dict[str, Any]:
    found = one["mismatch"][SAMPLED_AS_TRAINED]
    numbers = {key: _digits(found[key][0]) for key in ("k3", "p99")}
    counts = {key: found[key] for key in ("tokens", "prompts")}
    lengths = {length: _length(one, length) for length in one["responses"]}
    told = {"words": RUNGS[name].words, "step": RUNGS[name].step}
    return {"name": name, **told, **numbers, **counts, "by_length": lengths}


def _length(one: Mapping[str, Any], length: str) -> dict[str, Any]:
    windows = {
        statistic: {over: list(map(_digits, values[:LARGEST])) for over, values in by_over.items()}
        for statistic, by_over in one["windows"][length].items()
    }
    presets = {name: _preset(found) for name, found in one["presets"][length].items()}
    return {"count": one["responses"][length], "presets": presets, "values": windows}


def _preset(found: Any) -> list[float | None] | None:
    """Return a preset's numbers with four digits; None where rollouts alone have no numbers."""
    if isinstance(found, str):
        return None
    return [
        None if (value := found[key]) is None else _digits(value) for key in ("sequences", "tokens", "weight")
    ]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
