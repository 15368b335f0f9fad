"""The part of `docs/presets.md` that says what presets keep at the mismatch of a real model, from its record.

python -m lab.pages.kept
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.kept:main")

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.ladder.rungs import RUNGS
from lab.ladder.shipped import SAMPLED_AS_TRAINED, by_k3, commits
from lab.pages.parts import write
from lab.provenance import markdown_table
from mis_plugins.explain.rungs import short

RECORD = Path(__file__).parents[1] / "results" / "mismatch.json"
Rung = Mapping[str, Any]


def part(_: str) -> str:
    """What was measured, the windows that fit, and what each preset keeps."""
    return "\n".join(_part(json.loads(RECORD.read_text(encoding="utf-8"))))


def _part(record: Mapping[str, Any]) -> Iterator[str]:
    rungs = by_k3(record["rungs"])
    lengths = sorted(set.intersection(*({*map(int, rung["responses"])} for rung in rungs.values())))
    yield f"{record['model']}, sampled at {commits(record['rungs'].values())}; `lab/mismatch.py` is the command.\n"
    yield from _measured(rungs, lengths)
    yield from _windows(rungs, lengths)
    yield from _presets({name: rung for name, rung in rungs.items() if RUNGS[name].step}, lengths)


def _measured(rungs: Mapping[str, Rung], lengths: Sequence[int]) -> Iterator[str]:
    """A row for each rung."""
    rows = []
    for name, rung in rungs.items():
        numbers = rung["mismatch"][SAMPLED_AS_TRAINED]
        held = ", ".join(f"{rung['responses'][str(length)]} of {length}" for length in lengths)
        sizes = (f"{numbers['k3'][0]:.2g}", f"{numbers['p99'][0]:.2g}")
        rows.append((name, RUNGS[name].words, numbers["prompts"], numbers["tokens"], *sizes, held))
    heads = ("rung", "rollout weights", "prompts", "tokens", "k3", "p99 of abs log r", "responses of each length")
    yield markdown_table(heads, rows)


def _windows(rungs: Mapping[str, Rung], lengths: Sequence[int]) -> Iterator[str]:
    """A window for each rung and length."""
    yield "A window of `(prod r)^(1/n)` that keeps nine of ten responses of `n` tokens, rounded outwards.\n"
    rows = ((name, *(window(rung["fits"][str(length)]) for length in lengths)) for name, rung in rungs.items())
    yield markdown_table(("rung", *(f"n = {length}" for length in lengths)), rows)


def window(fits: Sequence[float]) -> str:
    """The window that fits, rounded outwards."""
    low, high = fits
    return f"[{math.floor(1000 * low) / 1000:.3f}, {math.ceil(1000 * high) / 1000:.3f}]"


def _presets(steps: Mapping[str, Rung], lengths: Sequence[int]) -> Iterator[str]:
    """A row for each preset: the steps of the ladder at the shortest, the middle and the longest length."""
    shown = [str(length) for length in sorted({lengths[place] for place in (0, len(lengths) // 2, -1)})]
    told = ", ".join(shown)
    yield f"Percent of the tokens kept in responses of {told} tokens; then the mean weight of the longest.\n"
    k3 = {name: rung["mismatch"][SAMPLED_AS_TRAINED]["k3"][0] for name, rung in steps.items()}
    rows = (
        (f"`{preset}`", *(_cell([rung["presets"][length][preset] for length in shown]) for rung in steps.values()))
        for preset in next(iter(steps.values()))["presets"][shown[0]]
    )
    yield markdown_table(("preset", *(f"{name}, k3 {short(k3[name])}" for name in steps)), rows).rstrip()


def _cell(by_length: Sequence[Any]) -> str:
    """What a preset keeps at each length; words stand where rollouts alone have no numbers."""
    shares = [numbers for numbers in by_length if isinstance(numbers, Mapping)]
    if not shares:
        return "-"
    weight = shares[-1]["weight"]
    kept = " ".join(f"{100 * numbers['tokens']:.0f}" for numbers in shares)
    return f"{kept}; {'-' if weight is None else f'{weight:.2f}'}"


def main() -> int:
    """Write the part."""
    return write("presets.md", part, __doc__)
