"""How often the detectors of `python -m mis_plugins report` are right: clean runs, and runs with one cause planted.

    python -m lab.report_causes --runs 50

Each run has some 20,000 tokens (`lab/planted_runs.py`). A clean run counts as a false alarm of each detector
that fires. A planted run counts as found where its cause is told, and as found alone where no other cause is told.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.report_causes:main", extra="report")

import math
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from lab.planted_runs import PLANTS, PRECISIONS, planted
from lab.provenance import markdown_table, parser_of, write_record
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.report.causes import CAUSES
from mis_plugins.report.survey import Survey, report
from mis_plugins.shared.progress import told
from mis_plugins.shared.provenance import as_given, as_markdown, measured_with

RESULTS = Path("lab/results")
MEASURED = ("mis_plugins/report", "mis_plugins/metrics", "lab/planted_runs.py")


def found_in(cause: str | None, seed: int) -> list[str]:
    """Return the causes that the report names for one run; the engine's precision changes with the seed."""
    survey = Survey.of(CorrectionConfig(), [])
    survey.add_all(planted(cause, seed, list(PRECISIONS)[seed % len(PRECISIONS)]))
    made = report(survey)
    return [] if made is None else [one.name for one in made.findings]


def of_seed(seed: int) -> dict[str, list[str]]:
    """Return the causes named for a seed's clean run, under the empty name, and for each planted run."""
    torch.set_num_threads(1)
    return {name: found_in(name or None, seed) for name in ("", *PLANTS)}


def counted(runs: int, first: int, processes: int = 1) -> dict[str, Counter[str]]:
    """Count how often each cause, and the right cause alone, is named for each plant and clean runs ("")."""
    counts = {name: Counter() for name in ("", *PLANTS)}
    seeds = range(first, first + runs)
    with ProcessPoolExecutor(processes) as pool:
        watched = told(seeds, f"seeds of {len(counts)} runs")
        for _, done in zip(watched, pool.map(of_seed, seeds), strict=True):
            for name, names in done.items():
                counts[name].update(names)
                counts[name]["runs"] += 1
                counts[name]["alone"] += names == [PLANTS.get(name)]
    return counts


def upper_bound(events: int, runs: int) -> float:
    """Return the upper 95% confidence bound of a rate of events (Wilson, one-sided)."""
    z, rate = 1.645, events / runs
    middle = rate + z * z / (2 * runs)
    return (middle + z * math.sqrt(rate * (1 - rate) / runs + z * z / (4 * runs * runs))) / (1 + z * z / runs)


def table(counts: dict[str, Counter[str]]) -> str:
    """Write the record as a table of markdown."""
    clean, rows = counts[""], []
    for name in sorted(PLANTS, key=lambda plant: list(CAUSES).index(PLANTS[plant])):
        one, cause = counts[name], PLANTS[name]
        bound = upper_bound(clean[cause], clean["runs"])
        found = f"{one[cause]} of {one['runs']}", one["alone"], f"{clean[cause]} of {clean['runs']}"
        rows.append((name, *found, f"{bound:.1%}"))
    headings = ("cause", "found", "found alone", "false alarms in clean runs", "rate at most (95%)")
    return markdown_table(headings, rows)


def main() -> int:
    """Measure, print, and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--runs", type=int, default=50, help="clean runs, and runs of each cause (default: %(default)s)"
    )
    parser.add_argument("--first", type=int, default=1000, help="first seed; thresholds were set on others")
    parser.add_argument("--processes", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--smoke", action="store_true", help="two seeds, and nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = counted(2 if options.smoke else options.runs, options.first, options.processes)
    print(table(counts))
    if not options.smoke:
        made = measured_with(as_given("python -m lab.report_causes", sys.argv[1:]), MEASURED)
        write(options.results, counts, made)
    return 0


def write(folder: Path, counts: dict[str, Counter[str]], made: dict[str, str]) -> None:
    """Write the record: json for programs, markdown for people."""
    content = {
        "measured_with": made,
        "counts": {name or "clean": dict(count) for name, count in counts.items()},
    }
    text = f"# Detectors of the report: power and false alarms\n\n{table(counts)}\n{as_markdown(made)}"
    write_record(folder / "report_causes.json", content, text)
