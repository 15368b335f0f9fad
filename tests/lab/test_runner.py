"""The runner of experiments: what is run again and what is not, what a failure and an interrupt leave, what is said."""

import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import provenance
from lab.experiments import runner
from lab.experiments.runner import LOG, STAMP, Arm, parsed, run_arms, training
from lab.host.folders import SUMMARY


def arm(root: Path, name: str = "arm", work: Callable[[], int] = lambda: 0, **settings: object) -> Arm:
    """An arm that leaves a line a run, beside its folder."""

    def leaves_a_line() -> int:
        with (root / "ran").open("a") as file:
            file.write(f"{name}\n")
        os.write(1, b"said\n")
        return work()

    return Arm(root / name, settings, leaves_a_line)


def ran(root: Path) -> list[str]:
    return (root / "ran").read_text().split() if (root / "ran").is_file() else []


def test_an_arm_runs_again_for_other_settings_and_other_code_alone(tmp_path: Path) -> None:
    """Code that no commit holds repeats every arm."""
    for lr, code, times in (
        (1, "a", 1),
        (1, "a", 1),
        (1, "b", 2),
        (2, "b", 3),
        (2, "b", 3),
        (2, None, 4),
        (2, None, 5),
    ):
        one = arm(tmp_path, lr=lr, path=str(tmp_path))
        assert run_arms([one], 1, code) == 0 and (one.folder / STAMP).is_file()
        assert len(ran(tmp_path)) == times
    assert (tmp_path / "arm" / LOG).read_text() == "said\n"


def test_a_failure_ends_the_experiment_and_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though an earlier run of the arm was finished, no stamp of it is left."""
    first, second, third = (arm(tmp_path, name, work=lambda name=name: 2 * (name == "b")) for name in "abc")
    second.stamp("earlier")
    assert run_arms([first, second, third], 1, "a") == 2
    assert ran(tmp_path) == ["a", "b"]
    assert [(one.folder / STAMP).is_file() for one in (first, second, third)] == [True, False, False]
    said = capsys.readouterr().err
    assert "1 of 3" in said and "2 of 3" in said and f"failed with exit code 2, see {LOG} there" in said
    assert run_arms([first, arm(tmp_path, "b"), third], 1, "a") == 0
    assert ran(tmp_path) == ["a", "b", "b", "c"]


def test_an_exception_is_told_where_the_experiment_says_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> int:
        raise ArithmeticError("infinite")

    monkeypatch.setattr(sys, "stderr", open(2, "w", closefd=False))  # pytest's stream would pass the arm's log by
    assert run_arms([arm(tmp_path, work=fails)], 1, "a") == 1
    assert "ArithmeticError: infinite" in (tmp_path / "arm" / LOG).read_text()


def test_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    one = arm(tmp_path)
    one.folder.mkdir()
    (one.folder / SUMMARY).write_text("{}")
    run_arms([one], 1, "a")
    assert (tmp_path / "arm-2" / SUMMARY).is_file() and not (one.folder / SUMMARY).exists()


def test_two_at_a_time(tmp_path: Path) -> None:
    """Each waits for the other, which one alone could not."""

    def meets() -> int:
        for _ in range(500):
            if len(ran(tmp_path)) == 2:
                return 0
            time.sleep(0.02)
        return 1

    assert run_arms([arm(tmp_path, name, meets) for name in "ab"], 2, "a") == 0


INTERRUPTED = """
import signal, sys, time, types
sys.modules["lab.host.loop"] = types.ModuleType("loop")  # Megatron, which no arm here trains in
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from pathlib import Path
from lab.experiments.runner import Arm, run_arms

def work(name):
    Path(sys.argv[1], name).mkdir(exist_ok=True)
    try:
        Path(sys.argv[1], name, "begun").touch()
        time.sleep(60 if name == "b" else 0)
    except KeyboardInterrupt:
        Path(sys.argv[1], name, "ended").touch()
        raise
    return FAILS == name

arms = [Arm(Path(sys.argv[1], name), {}, lambda name=name: work(name)) for name in "abc"]
sys.exit(run_arms(arms, PROCESSES, "a"))
"""


def interrupted(tmp_path: Path, processes: int, fails: str) -> tuple[int, str]:
    """Exit code and output of a run that gets Ctrl-C while arm b sleeps."""
    constants = f"FAILS, PROCESSES = {fails!r}, {processes}\n"
    process = subprocess.Popen(
        [sys.executable, "-c", constants + INTERRUPTED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    said = process.stderr.readline()  # of arm a, which ends first
    while not (tmp_path / "b" / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    return process.wait(timeout=60), said + process.stderr.read()


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    code, said = interrupted(tmp_path, 1, "none")
    assert code == 130 and "b interrupted after" in said
    assert (tmp_path / "a" / STAMP).is_file()
    assert not (tmp_path / "b" / STAMP).exists() and not (tmp_path / "c").exists()


def test_the_first_ctrl_c_after_a_failure_lets_the_others_end_too(tmp_path: Path) -> None:
    code, said = interrupted(tmp_path, 2, "a")
    assert code == 1 and "a failed with exit code 1" in said and "b interrupted after" in said
    assert (tmp_path / "b" / "ended").exists()


def test_ctrl_c_between_two_calls_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = runner.Queue.goes_on.fget
    assert goes_on

    def interrupted_once_running(queue: runner.Queue) -> bool:
        if queue._running and not queue._obeyed:
            os.kill(os.getpid(), signal.SIGINT)
        return goes_on(queue)

    monkeypatch.setattr(runner.Queue, "goes_on", property(interrupted_once_running))
    assert run_arms([arm(tmp_path, name, lambda: time.sleep(60) or 0) for name in "ab"], 1, "a") == 130
    assert not (tmp_path / "b").exists() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_training_is_known_by_all_its_arguments(tmp_path: Path) -> None:
    written: list[int] = []

    def words() -> list[str]:
        written.append(1)
        return ["--output", str(tmp_path / "run"), "--lr", "3e-4"]

    one = training(words)
    assert one.folder == tmp_path / "run" and one.settings["lr"] == 3e-4
    one.stamp("a")
    assert one.made("a") and not one.made("b") and not one.made(None)
    assert not training(lambda: [*words(), "--seed", "3"]).made("a")


def test_a_smoke_run_writes_nothing_where_a_full_one_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(line: str) -> tuple[Path, Path]:
        monkeypatch.setattr(sys, "argv", ["command", *line.split()])
        found = parsed(ArgumentParser(), "name")
        assert found.processes == 2 and found.seeds == runner.SEEDS == (0, 1, 2)
        return found.runs, found.results

    assert folders("") == (Path("runs/name"), Path("lab/results"))
    assert folders("--smoke") == (Path("runs/name-smoke"),) * 2
    assert folders("--smoke --runs a --results b") == (Path("a"), Path("b"))


def test_a_tree_that_no_commit_holds_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    assert provenance.committed_tree("code") is None, "no repository"
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    first = provenance.committed_tree("code")
    assert first is not None and len(first) == 40
    (tmp_path / "notes").write_text("elsewhere")
    assert provenance.committed_tree("code") == first
    (tmp_path / "code/b.py").write_text("2")
    assert provenance.committed_tree("code") is None, "a file that git does not know"
    (tmp_path / "code/b.py").unlink()
    (tmp_path / "code/a.py").write_text("2")
    assert provenance.committed_tree("code") is None
    assert provenance.measured_with("c", ("code",))["mis-plugins commit"].endswith(" (modified)")
    assert not provenance.measured_with("c", ("notes",))["mis-plugins commit"].endswith(" (modified)")
    git("commit", "-qam", "two")
    assert provenance.committed_tree("code") not in (None, first)
