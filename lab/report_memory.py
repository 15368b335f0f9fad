"""How much memory `python -m mis_plugins report` takes for 10 GB of dumps, beside the bound that docs/report.md states.

    python -m lab.report_memory               10 GB on disk while it runs; some ten minutes on one core
    python -m lab.report_memory --gigabytes 1

One rollout as slime dumps it is written many times under different numbers, since the report reads rollout by rollout.
The command runs as a process of its own, whose peak of resident memory the kernel tells. The dumps are deleted.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.report_memory:main", extra="report")

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lab.pages.report import MEMORY_BESIDE, MEMORY_TIMES
from lab.provenance import as_markdown, provenance

RESPONSES, LENGTH, PROMPT = 512, 4096, 256
VOCABULARY = 150_000


def rollout() -> dict[str, Any]:
    """Build a rollout of slime's training dump, with every column that slime writes for each token."""
    generator = torch.Generator().manual_seed(0)
    samples = [_sample(place, generator) for place in range(RESPONSES)]
    shard = {"data_parallel_rank": 0, "partition": [*range(RESPONSES)]}
    return {"format_version": 2, "rank": 0, "samples": samples, "dp_shards": [shard]}


def _sample(place: int, generator: torch.Generator) -> dict[str, Any]:
    size = LENGTH // 2 + int(torch.randint(LENGTH // 2, (), generator=generator))
    behavior = -3 * torch.rand(size, generator=generator)
    proximal = behavior + 0.05 * torch.randn(size, generator=generator)
    return {
        "data_parallel_rank": 0,
        "rollout_position": place,
        "sample_index": place,
        "tokens": torch.randint(VOCABULARY, (PROMPT + size,), generator=generator),
        "loss_masks": torch.ones(size, dtype=torch.int32),
        "rollout_log_probs": behavior,
        "log_probs": proximal,
        "advantages": torch.full((size,), float(torch.randn((), generator=generator))),
        "returns": torch.zeros(size),
        "kl": torch.zeros(size),
    }


def write_dumps(folder: Path, size: int) -> dict[str, int]:
    """Write rollouts up to `size` bytes; return the bytes of all and of one, rollouts, and valid tokens."""
    folder.mkdir(parents=True)
    made, written, number, one = rollout(), 0, 0, 0
    while written < size:
        file = folder / f"{number}.pt"
        torch.save(made | {"rollout_id": number}, file)
        one = file.stat().st_size
        written, number = written + one, number + 1
        if shutil.disk_usage(folder).free < 2 * 1024**3:
            raise SystemExit(f"{folder}: the disk is full; name another one with --folder")
    tokens = number * sum(sample["loss_masks"].numel() for sample in made["samples"])
    return {"bytes": written, "bytes of a rollout": one, "rollouts": number, "tokens": tokens}


def measured(folder: Path, output: Path) -> dict[str, float]:
    """Run the report over a folder, and return its seconds and its peak of resident memory."""
    begun = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "mis_plugins", "report", str(folder), "--output", str(output)]
    )
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"the report failed with exit status {os.waitstatus_to_exitcode(status)}")
    return {
        "peak bytes": used.ru_maxrss * 1024,
        "seconds": time.monotonic() - begun,
        "processor seconds": used.ru_utime + used.ru_stime,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dumps, run the report, print its memory beside the bound, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of dumps (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="where the dumps are written for a while (default: /tmp's)"
    )
    parser.add_argument("--results", type=Path, default=Path("lab/results"), metavar="FOLDER")
    options = parser.parse_args(argv)
    made = provenance()
    with TemporaryDirectory(prefix="report-memory-", dir=options.folder) as scratch:
        dumps = write_dumps(Path(scratch) / "train_data", int(options.gigabytes * 1e9))
        found = dumps | measured(Path(scratch) / "train_data", Path(scratch) / "report")
        told = json.loads((Path(scratch) / "report" / "report.json").read_text())
    if told["whole"]["tokens"] != dumps["tokens"] or len(told["steps"]) != dumps["rollouts"]:
        raise SystemExit(f"the report counted {told['whole']['tokens']:.0f} of {dumps['tokens']} tokens")
    found["bound"] = MEMORY_BESIDE + MEMORY_TIMES * dumps["bytes of a rollout"]
    write(options.results, found, made)
    return int(found["peak bytes"] > found["bound"])


def write(folder: Path, found: dict[str, float], made: dict[str, str]) -> None:
    """Print the record and write it: json for programs, markdown for people."""
    rows = [
        ("dumps", f"{found['bytes'] / 1e9:.1f} GB in {found['rollouts']:.0f} rollouts"),
        ("tokens", f"{found['tokens'] / 1e6:.0f} million"),
        ("one rollout", f"{found['bytes of a rollout'] / 1e6:.0f} MB"),
        ("stated bound", f"{found['bound'] / 1e9:.2f} GB"),
        ("peak of resident memory", f"{found['peak bytes'] / 1e9:.2f} GB"),
        ("time", f"{found['seconds']:.0f} s, of which {found['processor seconds']:.0f} s of one processor"),
    ]  # fmt: skip
    text = "# Memory of the report\n\n| | |\n|---|---|\n" + "".join(
        f"| {name} | {value} |\n" for name, value in rows
    )
    print(text)
    content = {"measured_with": made, "found": found}
    (folder / "report_memory.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "report_memory.md").write_text(f"{text}\n{as_markdown(made)}", encoding="utf-8")
