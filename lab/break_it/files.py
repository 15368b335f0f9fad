"""Room `files`: commands in a process of their own, with files in the way, a full disk, a twin, or Ctrl-C at any time.

A command ends in time, by a code that it documents, without a traceback. Where a file is in the way, it says so with
code 2. What it was asked to write is whole, of one run, or still what was there before, and no partial file stays.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from mis_plugins.shared.files import PREFIX

SHRINKS = False  # cases take seconds, and what time decides does not repeat
SECONDS = 300  # that a command may take on a loaded machine
STEP = {"behavior_log_probs": [-0.5] * 200, "proximal_log_probs": [*[-0.51] * 199, -0.52], "tokens": list(range(200))}
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
CUDA_OFF = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
COMMANDS = {
    "report": "-m mis_plugins report {given} --output {made} --sweep none",
    "diff": "-m true_on_policy diff {given} {given} --json {made}/diff.json",
    "check": "-m mis_plugins config check {given}",
    "suggest": "-m mis_plugins config suggest {given}",
}
SUFFIX = {"report": "jsonl", "diff": "npz", "check": "yaml", "suggest": "jsonl"}
FRAME = re.compile(r'File "[^"]*/((?:mis_plugins|true_on_policy)/[^"]*)", line \d+, in (\S+)')
STARTS = ("mis_plugins/shared/shell.py", "<module>")  # the frame of ours until which nothing of ours handles Ctrl-C
WRITES = ("report", "diff")
GIVEN = ("good", "good", "good", "absent", "a pipe", "a loop", "a folder", "unreadable", "empty")
MADE = ("free", "free", "old", "read-only", "a file", "a loop", "full", "short")


@dataclass(frozen=True)
class Case:
    """A command, what it is given, what lies where it writes, seconds until Ctrl-C, and whether it has a twin."""

    command: str
    given: str
    made: str
    stopped: float | None
    twin: bool


def cases() -> st.SearchStrategy[Case]:
    after = st.none() | st.floats(0, 4)
    return st.builds(Case, *map(st.sampled_from, (list(COMMANDS), GIVEN, MADE)), after, st.booleans())


def judge(case: Case) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given, made = _given(folder, case), _made(folder, case)
        words = [sys.executable, *COMMANDS[case.command].format(given=given, made=made).split()]
        started = [_start(words, case, made) for _ in range(1 + case.twin)]
        codes = {_ended(process, case) for process in started}
        _check_outputs(made, case, codes)
        if not made.is_symlink():
            made.chmod(0o755)  # its files are about to be removed
    return "interrupted" if 130 in codes else "our error" if 2 in codes else "right"


def _given(folder: Path, case: Case) -> Path:
    path = folder / f"given.{SUFFIX[case.command]}"
    match case.given:
        case "a pipe":
            os.mkfifo(path)
        case "a loop":
            path.symlink_to(path.name)
        case "a folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "good" | "unreadable":
            _write(path)
            path.chmod(0o644 if case.given == "good" else 0)
    return path


def _write(path: Path) -> None:
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps({"step": step} | STEP) + "\n" for step in range(4)))
        case ".npz":
            np.savez(path, a=np.arange(600, dtype=np.float32))
        case ".yaml":
            path.write_text("mis: {weight: {level: token, upper: 2.0}}\n")


def _made(folder: Path, case: Case) -> Path:
    made = folder / "made"
    match case.made:
        case "a file":
            made.touch()
        case "a loop":
            made.symlink_to("made")
        case _:
            made.mkdir()
    if case.made == "old":
        for name in ("report.html", "report.json", "diff.json"):
            (made / name).write_text("old")
    if case.made == "read-only":
        made.chmod(0o555)
    return made


def _start(words: list[str], case: Case, made: Path) -> subprocess.Popen[str]:
    """Start a command without the rights of root, in a namespace of its own where its disk is full."""
    limited = "ulimit -f 0; " if case.made == "short" else ""
    inside = [*NAMESPACE] if case.made == "full" and _has_namespaces() else []
    full = f"mount -t tmpfs -o size=4k none {made} && head -c 4096 /dev/zero >{made}/full; " if inside else ""
    rights = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.getuid() == 0 or inside else []
    shell = [*inside, "bash", "-c", f'{full}{limited}exec "$@"', "bash", *rights, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  (a job in the background ignores it)
    return subprocess.Popen(shell, env=os.environ | CUDA_OFF, preexec_fn=ignored, start_new_session=True, **pipes)


@cache
def _has_namespaces() -> bool:
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


def _ended(process: subprocess.Popen[str], case: Case) -> int:
    """The exit code of a command, which ends in time and as it documents."""
    with process:
        try:
            if case.stopped is not None:
                try:
                    process.wait(case.stopped)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGINT)
            said, told = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"no end after {SECONDS} s") from None
    code = process.returncode
    frames = FRAME.findall(told) if "Traceback" in told else []
    assert not frames or frames[-1] == STARTS, told
    # Before Python runs a line of ours, the signal ends the process as it ends any other.
    early = code == -signal.SIGINT or "KeyboardInterrupt" in told
    interrupted = case.stopped is not None and (code == 130 or early)
    assert interrupted or code in (0, 2), (code, told)
    assert code == 0 or (said + told).strip() or early, "an error without a word"
    assert interrupted or (code == 2) == _hindered(case), (code, said, told)
    return 130 if interrupted else code


def _hindered(case: Case) -> bool:
    if case.given != "good":
        return True
    if case.command not in WRITES or case.made in ("free", "old"):
        return False
    return case.made != "full" or _has_namespaces()


def _check_outputs(made: Path, case: Case, codes: set[int]) -> None:
    if case.command not in WRITES or not made.is_dir() or made.is_symlink():
        return
    left = {path.name: path for path in made.iterdir()}
    assert not [name for name in left if name.startswith(PREFIX)], sorted(left)
    old = case.made == "old"
    texts = {name: path.read_text() for name, path in left.items()}
    page, record = texts.get("report.html"), texts.get("report.json")
    for text, whole in ((page, "</html>"), (record, "}"), (texts.get("diff.json"), "}")):
        assert text is None or text.rstrip().endswith(whole) or (old and text == "old"), text and text[-200:]
    if case.command == "report":
        assert (page is None) == (record is None) and (page == "old") == (record == "old"), "files of two runs"
    if codes == {0}:
        expected = ("report.html", "report.json") if case.command == "report" else ("diff.json",)
        assert all(texts[name] != "old" for name in expected)
        [json.loads(texts[name]) for name in expected if name.endswith(".json")]
