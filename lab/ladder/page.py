"""The page of the mismatch: tables of a json, with the command and the machine that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.ladder.presets_at import NEEDS_ADVANTAGES, NEEDS_ROUTES
from lab.ladder.rungs import RUNGS
from lab.ladder.workloads import TURN_LENGTH, TURNS
from lab.provenance import as_markdown, markdown_table

HEAD = """# The mismatch of a real model

Made by `python -m lab.mismatch`: {size}.

Stock kernels on both sides, temperature 1; a response ends at its first end of sequence. `log r = log pi - log mu`,
trainer over engine; k1 is its negative mean, k3 the mean of `r - 1 - log r`. In brackets: 95% of a bootstrap over
prompts. Rounded weights are emulated: round to nearest, linear layers alone.

![k3 of each rung, and the geometric mean ratios of nine of ten responses by length](mismatch.png)
"""


def page(content: Mapping[str, Any]) -> str:
    parts = [HEAD.format(size=content["size"]), *_mismatch(content), *_bins(content)]
    parts += [*_turns(content), *_presets(content)]
    return "\n".join([*parts, as_markdown(content["measured_with"])])


def _mismatch(content: Mapping[str, Any]) -> Iterator[str]:
    yield "## Tokens and sequences\n"
    rows = []
    for rung, trainer, one in _pairs(content):
        spans = [span(one[name]) for name in ("k1", "k3", "p99")]
        products = [span(one[name]) for name in ("log product", "log product sd")]
        rows.append([RUNGS[rung].words, trainer, one["tokens"], *spans, f"{one['max']:.2g}", *products])
    statistics = ("tokens", "k1", "k3", "p99 of abs log r", "max", "log prod r, mean", "sd")
    yield markdown_table(("rollout", "trainer", *statistics), rows)


def _bins(content: Mapping[str, Any]) -> Iterator[str]:
    for what in ("k3 by position", "k3 by probability"):
        names = list(dict.fromkeys(name for _, _, one in _pairs(content) for name in one[what]))
        yield f"## {what}\n"
        rows = [
            (rung, trainer, *(span(one[what][name]) if name in one[what] else "-" for name in names))
            for rung, trainer, one in _pairs(content)
        ]
        yield markdown_table(("rollout", "trainer", *names), rows)


def _turns(content: Mapping[str, Any]) -> Iterator[str]:
    yield "## By turn of a chat\n"
    yield f"Chats of {TURNS} turns, up to {TURN_LENGTH} tokens each. A tool's result, which is masked, follows each."
    yield "The trainer scores a chat in one pass. k1 / k3 / p99 of abs log r.\n"
    rows = []
    for rung, one in content["rungs"].items():
        for trainer, turns in one["by turn"].items():
            cells = [" / ".join(span(turn[name]) for name in ("k1", "k3", "p99")) for turn in turns.values()]
            rows.append([rung, trainer, sum(turn["tokens"] for turn in turns.values()), *cells])
    yield markdown_table(("rollout", "trainer", "tokens", *(f"turn {turn}" for turn in range(1, TURNS + 1))), rows)


def _presets(content: Mapping[str, Any]) -> Iterator[str]:
    yield "## What every preset keeps, and its mean weight\n"
    yield "Share of kept sequences / share of kept tokens / mean weight of the kept tokens; trainer in bf16. A preset"
    yield "without effect has 1 / 1 / 1. One with OPSM needs advantages, which rollouts alone do not have, and one over"
    yield "routes needs a mixture of experts. A length that fewer than four responses reach has no numbers.\n"
    for length in content["lengths"]:
        rungs = {name: one["presets"].get(str(length), {}) for name, one in content["rungs"].items()}
        held = {name: one["responses"].get(str(length), 0) for name, one in content["rungs"].items()}
        if not any(held.values()):
            continue
        yield f"### Responses of at least {length} tokens, cut there\n"
        presets = next(filter(None, rungs.values()))
        rows = [(preset, *(_kept(found.get(preset)) for found in rungs.values())) for preset in presets]
        yield markdown_table(("preset", *(f"{name}, {count} responses" for name, count in held.items())), rows)


def _pairs(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for rung, one in content["rungs"].items():
        for trainer, found in one["mismatch"].items():
            yield rung, trainer, found


def span(value: Sequence[float]) -> str:
    """A statistic with its interval."""
    middle, low, high = (f"{number:.2g}" for number in value)
    return f"{middle} [{low}, {high}]"


def _kept(one: Any) -> str:
    if one in (None, NEEDS_ADVANTAGES, NEEDS_ROUTES):
        return "-"
    weight = "-" if one["weight"] is None else f"{one['weight']:.2f}"
    return f"{one['sequences']:.2f} / {one['tokens']:.2f} / {weight}"
