"""The runner of experiments: what is run again and what is not, what a failure and an interrupt leave, what is said."""

import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ROOT

from lab import provenance
from lab.experiments import runner
from lab.experiments.runner import STAMP, Arm, parsed, run_arms


def arm(root: Path, name: str = "arm", work: Callable[[], object] = lambda: 0, **settings: object) -> Arm:
    """An arm that leaves a line a run, beside its folder."""

    def leaves_a_line() -> None:
        with (root / "ran").open("a") as file:
            file.write(f"{name}\n")
        work()

    return Arm(root / name, settings, leaves_a_line)


def ran(root: Path) -> list[str]:
    return (root / "ran").read_text().split() if (root / "ran").is_file() else []


def fails() -> None:
    raise ArithmeticError("infinite")


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
        one = arm(tmp_path, lr=lr, path=(str(tmp_path),))
        assert run_arms([one], code) == 0 and (one.folder / STAMP).is_file()
        assert len(ran(tmp_path)) == times


def test_a_failure_ends_the_experiment_and_is_repeated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Though an earlier run of the arm was finished, no stamp of it is left."""
    first, broken, third = (arm(tmp_path, name, fails if name == "b" else lambda: 0) for name in "abc")
    assert run_arms([arm(tmp_path, "b")], "earlier") == 0
    assert run_arms([first, broken, third], "a") == 1
    assert ran(tmp_path) == ["b", "a", "b"]
    assert [(one.folder / STAMP).is_file() for one in (first, broken, third)] == [True, False, False]
    said = capfd.readouterr().err
    assert "1 of 3" in said and "ArithmeticError: infinite" in said
    assert run_arms([first, arm(tmp_path, "b"), third], "a") == 0
    assert ran(tmp_path) == ["b", "a", "b", "b", "c"]


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    interrupt = lambda: os.kill(os.getppid(), signal.SIGINT) or signal.pause()  # noqa: E731
    arms = [arm(tmp_path, name, interrupt if name == "b" else lambda: 0) for name in "abc"]
    assert run_arms(arms, "a") == 130
    assert [(one.folder / STAMP).is_file() for one in arms] == [True, False, False]
    assert ran(tmp_path) == ["a", "b"]


def test_a_smoke_run_writes_nothing_where_a_full_one_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(line: str) -> tuple[Path, Path]:
        monkeypatch.setattr(sys, "argv", ["command", *line.split()])
        found = parsed(ArgumentParser(), "name")
        assert found.seeds == runner.SEEDS == (0, 1, 2)
        return found.runs, found.results

    assert folders("") == (Path("runs/name"), Path("lab/results"))
    assert folders("--smoke") == (Path("runs/name-smoke"),) * 2
    assert folders("--smoke --runs a --results b") == (Path("a"), Path("b"))


@pytest.mark.parametrize(
    ("program", "module"),
    [("lab/walk.py", "lab.walk"), (ROOT / "lab/walk.py", "lab.walk"), ("lab/break_it/__main__.py", "lab.break_it")],
)
def test_a_record_names_its_command_by_the_module(
    program: str | Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(program), "--smoke"])
    assert provenance.provenance()["command"] == f"python -m {module} --smoke"


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
