"""Room `memory`: `mis-plugins report` over a host's dumps under a limit of memory, reported whole or refused in words.

`python -m lab.break_it.memory` does it once with 10 GB of dumps, 300 million tokens. They lie in the folder of
temporary files for some minutes; `lab/results/report_memory.md` has the outcome.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.break_it.memory:main", extra="report")

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from lab.break_it import ROOT
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, write_record

SHRINKS = False  # cases take seconds
RECORD = ROOT / "lab" / "results" / "report_memory.json"
MEGABYTE = 10**6
RESPONSES, LENGTH, PROMPT, VOCABULARY = 512, 4096, 256, 150_000
IMPORTED = "import mis_plugins.report.command, mis_plugins.report.page"
OPENBLAS = "OpenBLAS error: Memory allocation"  # its library then ends the process, which no code of Python prevents
ONE_THREAD = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """Dumps, and the address space that the report may take.

    room: megabytes beyond what the process takes for its imports.
    """

    rollouts: int
    responses: int
    room: int


def cases() -> st.SearchStrategy[Case]:
    return st.builds(Case, st.integers(1, 3), st.sampled_from([16, 64, 128]), st.integers(0, 120))


@dataclass(frozen=True)
class Ended:
    """How a report ended: exit code, what it said, peak of resident bytes, seconds, and seconds of the processor."""

    code: int
    told: str
    peak: int
    seconds: float
    processor: float


def judge(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokens = written(Path(folder, "dumps"), case.rollouts, case.responses)
        return answer(Path(folder), tokens, reported(Path(folder), imported() + case.room * MEGABYTE))


def answer(folder: Path, tokens: int, ended: Ended) -> str:
    """`right` where the report has every token or names what it did not read, `our error` where words refuse all."""
    assert "Traceback" not in ended.told, ended.told
    if OPENBLAS in ended.told:
        return "ended by OpenBLAS"
    assert ended.code in (0, 2), (ended.code, ended.told)
    if ended.code == 2:
        assert "memory" in ended.told and not Path(folder, "report.json").exists(), ended.told
        return "our error"
    found = json.loads(Path(folder, "report.json").read_text())["whole"]["tokens"]
    assert found == tokens or "not read" in ended.told, f"{found} of {tokens} tokens"
    return "right"


@cache
def imported() -> int:
    """Bytes of address space that a process takes at most for the imports of the report."""
    told = f"{IMPORTED}; print([x.split()[1] for x in open('/proc/self/status') if x.startswith('VmPeak')][0])"
    return 1024 * int(subprocess.check_output([sys.executable, "-c", told], env=os.environ | ONE_THREAD))


def written(folder: Path, rollouts: int, responses: int) -> int:
    """Write one rollout as slime dumps it under several numbers, and return the number of their tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = [_sample(place, generator) for place in range(responses)]
    shard = {"data_parallel_rank": 0, "partition": [*range(responses)]}
    folder.mkdir()
    for number in range(rollouts):
        content = {"format_version": 2, "rollout_id": number, "rank": 0, "samples": samples, "dp_shards": [shard]}
        torch.save(content, folder / f"{number}.pt")
    return rollouts * sum(sample["loss_masks"].numel() for sample in samples)


def _sample(place: int, generator: torch.Generator) -> dict[str, Any]:
    size = LENGTH // 2 + int(torch.randint(LENGTH // 2, (), generator=generator))
    behavior = -3 * torch.rand(size, generator=generator)
    return {
        "data_parallel_rank": 0, "rollout_position": place, "sample_index": place,
        "tokens": torch.randint(VOCABULARY, (PROMPT + size,), generator=generator),
        "loss_masks": torch.ones(size, dtype=torch.int32), "rollout_log_probs": behavior,
        "log_probs": behavior + 0.05 * torch.randn(size, generator=generator),
        "advantages": torch.randn((), generator=generator).expand(size).clone(),
        "returns": torch.zeros(size), "kl": torch.zeros(size),
    }  # fmt: skip


def reported(folder: Path, limit: int) -> Ended:
    """Run the report over `folder/dumps` in a process that may take `limit` bytes of address space."""
    words = [sys.executable, "-m", "mis_plugins", "report", str(folder / "dumps"), "--output", str(folder)]
    begun, limited = time.monotonic(), partial(resource.setrlimit, resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryFile("w+") as told:
        child = subprocess.Popen(words, env=os.environ | ONE_THREAD, preexec_fn=limited, stdout=told, stderr=told)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        told.seek(0)
        seconds = time.monotonic() - begun, used.ru_utime + used.ru_stime
        return Ended(child.returncode, told.read(), 1024 * used.ru_maxrss, *seconds)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rollouts", type=int, default=200, help="of some 50 MB each")
    parser.add_argument("--limit", type=float, default=1.5, help="GB of address space that the report may take")
    arguments = parser.parse_args(argv)
    measured = provenance()
    with tempfile.TemporaryDirectory() as name:
        tokens = written(Path(name, "dumps"), arguments.rollouts, RESPONSES)
        size = sum(file.stat().st_size for file in Path(name, "dumps").iterdir())
        print(f"{size / 1e9:.1f} GB written", file=sys.stderr, flush=True)
        ended = reported(Path(name), int(arguments.limit * 1e9))
        ends = {"right": "reported", "our error": "refused in words"}.get(
            said := answer(Path(name), tokens, ended), said
        )
    rows = (
        ("dumps", f"{size / 1e9:.1f} GB in {arguments.rollouts} rollouts, {tokens / 1e6:.0f} million tokens"),
        ("limit of address space", f"{arguments.limit:g} GB"),
        ("the report", ends),
        ("peak of resident memory", f"{ended.peak / 1e9:.2f} GB"),
        ("time", f"{ended.seconds:.0f} s, of which {ended.processor:.0f} s of one processor"),
    )
    table = markdown_table(("", ""), rows)
    write_record(
        RECORD, dict(rows) | {"measured with": measured}, f"# Memory of the report\n\n{table}\n{as_markdown(measured)}"
    )
    print(table)
    return 0
