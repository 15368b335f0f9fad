"""A collapse, its report, and the proposal of the report run: does the proposed config hold?

The report read the dump of an uncorrected run alone. Where the report trusted no config, the run was made again with
the next of `ENGINES`. The last report's proposal trained from the same warm start. A run whose engine has the trainer's
own weights is the control. The rules of the proposal were set after the runs of `SEEN`; the other seeds judge them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab.provenance import as_markdown

ENGINES = ("int3", "int4", "int8")

PROXIES = ("coefficient_cosine", "response_cosine")

SEEN = (7, 8, 9, 10, 11)

LEAST_START = 0.9  # as in docs/collapse.md: from a poor start a run falls with matched precision too


def markdown(content: Mapping[str, Any]) -> str:
    """Return the page of the record."""
    made, compared = {int(seed): one for seed, one in content["seeds"].items()}, content["proxies"]
    run = {seed: one for seed, one in made.items() if "runs" in one}
    poor = ", ".join(f"{seed} ({one['start']:.2f})" for seed, one in made.items() if seed not in run)
    text = (
        "# A collapse, its report, and the proposal run\n\nReward of the trainer's policy, at the start and over the "
        "last tenth of the run. matched: the engine has the trainer's own weights, so that nothing is to be "
        "corrected. A run with the next engine was made only where the report before trusted no config. In brackets: "
        "the overlap of both policies over whole responses in the run's opening, of which that report asked one half. "
        "fell: below half of the start.\n\n"
    )
    for heading, chosen in _groups(run):
        heads = (
            "seed",
            "start",
            "matched",
            *(f"uncorrected, {engine}" for engine in ENGINES),
            "proposed",
            "proposal",
        )
        text += f"{heading}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
        text += "".join(_row(seed, one) for seed, one in chosen.items()) + "\n"
    text += f"Not trained, for a warm start below {LEAST_START:g}: {poor}.\n" if poor else ""
    for seed, one in run.items():
        for engine, said in one["reports"].items():
            verdict = "\n".join(
                f"* {line}" for line in (said["verdict"]["headline"], *said["verdict"]["lines"])
            )
            text += f"\nThe report on the file of seed {seed}'s uncorrected run with {engine} alone:\n\n{verdict}\n"
    return f"{text}{_proxies(compared) if compared else ''}\n{as_markdown(content['measured_with'])}"


def _groups(run: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[int, Mapping[str, Any]]]]:
    """Yield the seeds that judge the rules and the seeds that made the rules, each with a heading, if any."""
    fresh = {seed: one for seed, one in run.items() if seed > max(SEEN)}
    if fresh:
        yield "Seeds that nobody had seen when the rules were set:", fresh
    if len(fresh) < len(run):
        yield "Seeds from which the rules were made:", {seed: run[seed] for seed in run if seed not in fresh}


def _row(seed: int, one: Mapping[str, Any]) -> str:
    """Write the row of a seed in the table."""
    runs, reports = one["runs"], one["reports"]
    uncorrected = [
        f"{_final(runs[f'uncorrected-{engine}'])} [{reports[engine]['opening']['response_overlap']:.2f}]"
        if engine in reports
        else ""
        for engine in ENGINES
    ]
    engine = list(reports)[-1]
    told = f"{reports[engine]['proposal']['name']}, with {engine}"
    cells = (
        seed,
        f"{one['start']:.2f}",
        _final(runs["matched"]),
        *uncorrected,
        _final(runs["proposed"]),
        told,
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def _final(run: Mapping[str, Any]) -> str:
    return f"{run['trainer_final']:.2f}{' (fell)' if run['collapsed'] else ''}"


def _proxies(compared: Mapping[str, Mapping[str, float]]) -> str:
    columns = (*PROXIES, "true")
    lines = "".join(f"| {name} | {_cells(one, columns)} |\n" for name, one in compared.items())
    return (
        "\nThe first seed's proxies beside the true cosine to the on-policy gradient (first row: two such gradients):\n"
        f"\n| config | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}\n{lines}"
    )


def _cells(one: Mapping[str, float], columns: Sequence[str]) -> str:
    return " | ".join(f"{one[name]:.3f}" if name in one else "" for name in columns)
