"""How many tokens a second and core `python -m mis_plugins report` reads, once they are loaded.

    python -m lab.report_speed

Timed by the processor's time of this process, on one thread: the step metrics alone, all collectors of the report, and
one pass over twenty presets.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.report_speed:main", extra="report")

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lab.provenance import as_markdown, markdown_table, parser_of, provenance, write_record
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.ratios import exp_clamped
from mis_plugins.report.numbers import StepNumbers, corrected
from mis_plugins.report.record import BATCH_TOKENS, Batch, Record
from mis_plugins.report.survey import Survey, keep_freed_memory
from mis_plugins.report.sweep import Sweep, candidates

LENGTH, PRESETS = 1024, 20
METRICS = replace(CorrectionConfig(), metrics="all")


def batch() -> Batch:
    """Build one batch of made-up tokens, with advantages, as a reader packs tokens."""
    generator = torch.Generator().manual_seed(0)
    behavior = -3 * torch.rand(BATCH_TOKENS, generator=generator)
    proximal = behavior + 0.05 * torch.randn(BATCH_TOKENS, generator=generator)
    advantages = torch.randn(BATCH_TOKENS, generator=generator)
    ids = torch.randint(0, 150_000, (BATCH_TOKENS,), generator=generator)
    mask = torch.ones(LENGTH, dtype=torch.bool)
    parts = zip(*(x.split(LENGTH) for x in (behavior, proximal, ids, advantages)), strict=True)
    made = (
        Record(0, str(i), mu, pi, mask, token, advantages=a) for i, (mu, pi, token, a) in enumerate(parts)
    )
    return Batch(0, tuple(made))


def speed(work: Callable[[], object], tokens: int) -> float:
    """Measure `work`, in millions of tokens a second of processor time."""
    work()
    times = max(tokens // BATCH_TOKENS, 1)
    begun = time.process_time()
    for _ in range(times):
        work()
    return times * BATCH_TOKENS / (time.process_time() - begun) / 1e6


def measure(tokens: int) -> dict[str, float]:
    """Return the speeds of the three works, in millions of tokens a second of processor time."""
    one = batch()
    ratio = exp_clamped(one.proximal - one.behavior)
    numbers, survey = StepNumbers(METRICS), Survey.of(CorrectionConfig(), [])
    sweep = Sweep.of(candidates("all", None)[1 : PRESETS + 1])
    works: dict[str, Callable[[], object]] = {
        "step metrics": lambda: numbers.add(one, corrected(one, METRICS)),
        "all of the report but configs": lambda: survey.add(one),
        f"{PRESETS} presets in one pass": lambda: sweep.add(one, ratio),
    }
    return {name: speed(work, tokens) for name, work in works.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the three speeds, and write the record."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--tokens", type=int, default=4_000_000, help="of each measurement (default: %(default)s)"
    )
    parser.add_argument("--results", type=Path, default=Path("lab/results"), metavar="FOLDER")
    parser.add_argument("--smoke", action="store_true", help="one batch, and nothing is written")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    busy = os.getloadavg()[0]
    speeds = measure(0 if options.smoke else options.tokens)
    for name, found in speeds.items():
        print(f"{name}: {found:.2f} M tokens/s and core")
    if not options.smoke:
        write(options.results, speeds, provenance() | {"load of the machine": f"{busy:.0f}"})
    return 0


def write(folder: Path, speeds: Mapping[str, float], made: dict[str, str]) -> None:
    """Write the record: json for programs, markdown for people."""
    content = {"measured_with": made, "million_tokens_a_second_and_core": speeds}
    table = markdown_table(
        ("work", "million tokens a second and core"), ((x, f"{y:.1f}") for x, y in speeds.items())
    )
    text = f"# Speed of the report after loading\n\n{table}\n{as_markdown(made)}"
    write_record(folder / "report_speed.json", content, text)
