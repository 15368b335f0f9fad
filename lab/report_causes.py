"""How often `python -m mis_plugins report` is right: runs with one cause planted in three severities, and clean runs.

    python -m lab.report_causes --runs 5

A plant stands in a made-up run of some 20,000 tokens, or in a recording of a real model (`lab/planted_runs.py`); the
precision of the engine, or the recorded rung, changes with the seed. A verdict is right where the first cause that it
names is the planted one. A clean run counts as a false alarm where the verdict is an alarm.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.report_causes:main", extra="report")

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from lab.planted_runs import IN_RECORDINGS, LADDER, PLANTS, clean, planted, planted_in_recording
from lab.provenance import as_given, as_markdown, markdown_table, measured_with, parser_of, write_record
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.report.record import Record
from mis_plugins.report.survey import Survey, report
from mis_plugins.report.verdict import verdict
from mis_plugins.shared.terminal import progress

RESULTS = Path("lab/results")
MEASURED = ("mis_plugins/report", "mis_plugins/metrics", "lab/planted_runs.py")
SEVERITIES = 3
PRECISIONS = ("bf16", "int8", "fp8")  # of made-up engines
CLEAN = "clean"
Key = tuple[str, str, int]  # where, plant, severity


def verdict_on(records: list[Record]) -> tuple[str, str]:
    """Return the level of the report on a run, and the first cause that it names."""
    survey = Survey.of(CorrectionConfig(), [])
    survey.add_all(records)
    made = report(survey)
    if made is None:
        return "none", ""
    return verdict(made, None).level, made.findings[0].name if made.findings else ""


def of_seed(seed: int) -> dict[Key, tuple[str, str]]:
    """Return level and first cause of every plant and severity of a seed."""
    torch.set_num_threads(1)
    precision, rung = PRECISIONS[seed % len(PRECISIONS)], LADDER[seed % len(LADDER)]
    grades = range(SEVERITIES)
    made = {("made up", name, one): planted(name, seed, precision, one) for name in PLANTS for one in grades}
    kept = {
        ("recorded", name, one): planted_in_recording(name, seed, rung, one) for name in IN_RECORDINGS for one in grades
    }
    return {key: verdict_on(records) for key, records in (made | kept).items()}


def of_clean(seed: int) -> tuple[str, str]:
    """Return level and first cause of a clean run."""
    torch.set_num_threads(1)
    return verdict_on(clean(seed))


def counted(runs: int, cleans: int, first: int, processes: int = 1) -> dict[Key, Counter[str]]:
    """Count runs, right first causes and calm verdicts of each plant, and the levels of clean runs."""
    counts: dict[Key, Counter[str]] = {}
    seeds, others = range(first, first + runs), range(first, first + cleans)
    with ProcessPoolExecutor(processes) as pool:
        for _, done in zip(progress(seeds, "seeds"), pool.map(of_seed, seeds), strict=True):
            for key, (level, name) in done.items():
                right = name == key[1].partition(",")[0]
                counts.setdefault(key, Counter()).update(runs=1, right=right, calm=level == "calm")
        for _, (level, _name) in zip(progress(others, "clean runs"), pool.map(of_clean, others), strict=True):
            counts.setdefault((CLEAN, "", 0), Counter()).update({"runs": 1, level: 1})
    return counts


def table(counts: Mapping[Key, Counter[str]]) -> str:
    """Write the record as a table of markdown, with a summary."""
    headings = ("run", "plant", "mild", "middle", "strong", "calm")
    return f"{markdown_table(headings, list(_rows(counts)))}\n{summary(counts)}\n"


def _rows(counts: Mapping[Key, Counter[str]]) -> Iterator[tuple[str, ...]]:
    for where, name in dict.fromkeys((where, name) for where, name, _ in counts if where != CLEAN):
        grades = [counts[where, name, one] for one in range(SEVERITIES)]
        shares = (f"{one['right']} of {one['runs']}" for one in grades)
        yield (where, name, *shares, str(sum(one["calm"] for one in grades)))


def summary(counts: Mapping[Key, Counter[str]]) -> str:
    """Return the shares over all plants, in a sentence."""
    plants = Counter[str]()
    for key, one in counts.items():
        plants.update(one if key[0] != CLEAN else {})
    clean_runs, kinds = (counts[CLEAN, "", 0], {name.partition(",")[0] for where, name, _ in counts if where != CLEAN})
    right = plants["right"] / plants["runs"]
    return (
        f"{len(counts) - 1} plants of {len(kinds)} causes in {plants['runs']} runs: the first cause is the planted one "
        f"in {right:.1%}, and {plants['calm']} verdicts are calm. Of {clean_runs['runs']} clean runs "
        f"{clean_runs['calm']} are calm, {clean_runs['watch']} get a warning and {clean_runs['alarm']} an alarm."
    )


def main() -> int:
    """Measure, print, and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="seeds of every plant (default: %(default)s)")
    parser.add_argument("--clean", type=int, default=200, help="clean runs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=1000, help="first seed; thresholds were set on others")
    parser.add_argument("--processes", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--smoke", action="store_true", help="one seed, two clean runs, and nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, cleans = (1, 2) if options.smoke else (options.runs, options.clean)
    counts = counted(runs, cleans, options.first, options.processes)
    print(table(counts))
    if not options.smoke:
        made = measured_with(as_given("python -m lab.report_causes", sys.argv[1:]), MEASURED)
        write(options.results, counts, made)
    return 0


def write(folder: Path, counts: Mapping[Key, Counter[str]], made: dict[str, str]) -> None:
    """Write the record: json for programs, markdown for people."""
    rows = [{"run": where, "plant": name, "severity": grade, **one} for (where, name, grade), one in counts.items()]
    content = {"measured_with": made, "summary": summary(counts), "counts": rows}
    text = f"# The report's verdicts on planted and clean runs\n\n{table(counts)}\n{as_markdown(made)}"
    write_record(folder / "report_causes.json", content, text)
