"""Room `memory`: `mis-plugins report` over dumps under a limit of memory, reported whole or refused in words."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

SHRINKS = False  # cases take seconds
MEGABYTE = 10**6
LENGTH, PROMPT, VOCABULARY = 4096, 256, 150_000
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


def judge(case: Case) -> str:
    """`right` where the report has every token or names what it did not read, `our error` where words refuse all."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = written(Path(folder, "dumps"), case.rollouts, case.responses)
        ended = reported(Path(folder), imported() + case.room * MEGABYTE)
        assert "Traceback" not in ended.stdout, ended.stdout
        if OPENBLAS in ended.stdout:
            return "ended by OpenBLAS"
        assert ended.returncode in (0, 2), (ended.returncode, ended.stdout)
        record = Path(folder, "report.json")
        if ended.returncode == 2:
            assert "memory" in ended.stdout and not record.exists(), ended.stdout
            return "our error"
        reads = json.loads(record.read_text())["whole"]["tokens"]
        assert reads == tokens or "not read" in ended.stdout, f"{reads} of {tokens} tokens"
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


def reported(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """Run the report over `folder/dumps` in a process that may take `limit` bytes of address space."""
    words = [sys.executable, "-m", "mis_plugins", "report", str(folder / "dumps"), "--output", str(folder)]
    limited = partial(resource.setrlimit, resource.RLIMIT_AS, (limit, limit))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(words, env=os.environ | ONE_THREAD, preexec_fn=limited, **pipes)
