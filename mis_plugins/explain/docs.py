"""The part of `docs/presets.md` that says what presets keep at the mismatch of a real model, from its record.

    python -m mis_plugins.explain.docs

Only what lies between the two comments that name this module is made; the rest of the page is written by hand, or by
`python -m lab.pages.presets`.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("mis_plugins.explain.docs:main")

import math
import re
from collections.abc import Iterator
from pathlib import Path

from mis_plugins.explain.rungs import Record, Responses, record, short

PAGE = Path(__file__).parents[2] / "docs" / "presets.md"
BEGIN, END = "<!-- made by python -m mis_plugins.explain.docs -->\n", "<!-- end of what was made -->"
PART = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)


def page(text: str) -> str:
    """The page with its tables of the record made anew."""
    made = "\n".join(_part(record()))
    return PART.sub(lambda _: f"{BEGIN}\n{made}\n\n{END}", text)


def _part(measured: Record) -> Iterator[str]:
    """What was measured, the windows that fit, and what each preset keeps."""
    yield from _measured(measured)
    yield from _windows(measured)
    yield from _presets(measured)


def _measured(measured: Record) -> Iterator[str]:
    """A row for each rung."""
    yield f"{measured.model}, sampled at {measured.commits}; `lab/mismatch.py` is the command.\n"
    yield (
        "| rung | rollout weights | prompts | tokens | k3 | p99 of abs log r | responses of each length |\n"
        + "|---" * 7
        + "|"
    )
    for rung in measured.rungs:
        held = ", ".join(f"{rung.by_length[length].count} of {length}" for length in measured.lengths)
        cells = (rung.name, rung.words, rung.prompts, rung.tokens, f"{rung.k3:.2g}", f"{rung.p99:.2g}", held)
        yield f"| {' | '.join(map(str, cells))} |"


def _windows(measured: Record) -> Iterator[str]:
    """A window for each rung and length."""
    yield "\nA window of `(prod r)^(1/n)` that keeps nine of ten responses of `n` tokens, rounded outwards.\n"
    yield f"| rung | {' | '.join(f'n = {length}' for length in measured.lengths)} |"
    yield "|---" * (1 + len(measured.lengths)) + "|"
    for rung in measured.rungs:
        cells = (window(rung.by_length[length]) for length in measured.lengths)
        yield f"| {rung.name} | {' | '.join(cells)} |"


def window(responses: Responses) -> str:
    """The window that fits, rounded outwards."""
    low, high = responses.window
    return f"[{math.floor(1000 * low) / 1000:.3f}, {math.ceil(1000 * high) / 1000:.3f}]"


def _presets(measured: Record) -> Iterator[str]:
    """A row for each preset: the steps of the ladder at the shortest, the middle and the longest length."""
    lengths = sorted({measured.lengths[place] for place in (0, len(measured.lengths) // 2, -1)})
    told = ", ".join(map(str, lengths))
    yield f"\nPercent of the tokens kept in responses of {told} tokens; then the mean weight of the longest.\n"
    yield f"| preset | {' | '.join(f'{rung.name}, k3 {short(rung.k3)}' for rung in measured.steps)} |"
    yield "|---" * (1 + len(measured.steps)) + "|"
    for name in measured.steps[0].by_length[lengths[0]].presets:
        rows = [[rung.by_length[length] for length in lengths] for rung in measured.steps]
        yield f"| `{name}` | {' | '.join(_cell(name, responses) for responses in rows)} |"


def _cell(name: str, by_length: list[Responses]) -> str:
    found = [responses.presets[name] for responses in by_length]
    known = [one for one in found if one is not None]
    if not known:
        return "-"
    weight = known[-1].weight
    kept = " ".join(f"{100 * one.tokens:.0f}" for one in known)
    return f"{kept}; {'-' if weight is None else f'{weight:.2f}'}"


def main() -> int:
    """Write the part."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0
