"""The processes of one run: their environment, which installs the bends, and an end that leaves no process.

Ray's own processes, its workers and SGLang's children inherit the environment, and with it a mark of this
run. The mark finds all of them at the end, whatever parent they have by then.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.in_host.launching import GPUS, REPOSITORY

MARK = "MIS_PLUGINS_IN_HOST"
GRACE_S = 5.0
LOCK = Path(tempfile.gettempdir()) / "mis-plugins-in-host.lock"
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "PYTHONUNBUFFERED": "1",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # beside other jobs, workers at Ray's niceness of 15 wait for minutes
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_OVERRIDE_RESOURCES": f'{{"CPU": 16, "GPU": {GPUS}}}',
}


def environment(checkout: Path, megatron: Path, mark: str, ray_folder: str) -> dict[str, str]:
    """Build the environment of all processes of a run; a cluster that is up already is not joined."""
    paths = (
        REPOSITORY / "lab" / "in_host" / "site", REPOSITORY, checkout, megatron,
        REPOSITORY / "true_on_policy" / "engines" / "sglang" / "stand_in",
    )  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    bin_folder = str(Path(sys.executable).parent)
    return inherited | SETTINGS | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), MARK: mark, "RAY_TMPDIR": ray_folder,
        "PATH": f"{bin_folder}{os.pathsep}{inherited.get('PATH', '')}",
    }  # fmt: skip


@contextmanager
def alone(lock: Path = LOCK) -> Iterator[None]:
    """Wait until no other run of a host is under way on this machine.

    Engines of two runs may take one port, and then one run's trainer updates the weights of the other run's engine.
    """
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another run of a host is under way on this machine: waiting for its end", file=sys.stderr)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextmanager
def marked(checkout: Path, megatron: Path) -> Iterator[dict[str, str]]:
    """Give the environment of a run, and end every process that carries its mark on leaving."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="mis", ignore_cleanup_errors=True) as ray_folder, _interruptible():
        try:
            yield environment(checkout, megatron, mark, ray_folder)
        finally:
            end(mark)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, and at SIGINT, which a job in the background starts with ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run(command: Sequence[str], cwd: Path, settings: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Run a command with all its output in a file, and return its exit code, or None where it ran too long."""
    with log.open("w") as stream:
        started = subprocess.Popen(command, cwd=cwd, env=settings, stdout=stream, stderr=subprocess.STDOUT)
        try:
            return started.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None


def end(mark: str) -> None:
    """End all processes that carry the mark: ask first, kill after GRACE_S seconds."""
    _signal(mark, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while _left(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    while _left(mark):
        _signal(mark, signal.SIGKILL)
        time.sleep(0.2)


def _left(mark: str) -> bool:
    """Look twice: the environment of a process reads as empty while the process starts another program."""
    if of(mark):
        return True
    time.sleep(0.2)
    return bool(of(mark))


def _signal(mark: str, number: signal.Signals) -> None:
    for process in of(mark):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass


def of(mark: str) -> list[int]:
    """List the living processes whose environment carries the mark."""
    wanted = f"{MARK}={mark}".encode()
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ")
            if wanted in _read(path) and not _is_zombie(path.parent)]  # fmt: skip


def _read(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []


def _is_zombie(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
