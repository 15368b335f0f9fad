"""`lab.host_history`: a checkout made from the table of needs, committed step by step."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_checkout import ENDPOINT, LOSSES, NEWEST, RAN, write

from lab.host_history import main
from mis_plugins.hosts.needs.miles import NEEDS as MILES


def told(capsys: pytest.CaptureFixture[str], directory: Path) -> tuple[int, str]:
    code = main([str(directory)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def git(root: Path, *command: str, day: str = "2026-04-01") -> None:
    dated = {"GIT_AUTHOR_DATE": f"{day}T12:00:00", "GIT_COMMITTER_DATE": f"{day}T12:00:00", "HOME": str(root)}
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *name, *command], cwd=root, env={"PATH": "/usr/bin:/bin", **dated}, check=True)


def test_the_commit_at_which_a_need_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A need breaks on 2 April and is back on 3 April; a pull request of 4 April breaks another need."""
    root = write(tmp_path, MILES, RAN)
    git(root, "init", "-q", "-b", "main")
    file = root / LOSSES
    source = file.read_text()
    for day, text in (("2026-04-01", source), ("2026-04-02", ""), ("2026-04-03", source)):
        file.write_text(text)
        git(root, "add", "-A")
        git(root, "commit", "-qm", day, day=day)
    git(root, "checkout", "-qb", "request")
    (root / ENDPOINT).unlink()
    git(root, "commit", "-qam", "moved", day="2026-04-04")
    git(root, "update-ref", "refs/pull/17/head", "HEAD")
    git(root, "checkout", "-q", "main")
    code, text = told(capsys, root)
    assert code == 1 and "3 commits of its main line" in text and "and 1 stored" in text
    (loss,) = (line for line in text.splitlines() if line.startswith("its policy loss"))
    assert loss.count("2026-04-03") == loss.count("2026-04-02") == 1 and loss.endswith("none")
    (prompt,) = (line for line in text.splitlines() if line.startswith("the tokens of a prompt"))
    assert "2026-04-01" in prompt and "never" in prompt and prompt.endswith("17")


def test_an_address_that_changes_is_told_as_a_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for day, which in (("2026-04-01", RAN), ("2026-04-05", NEWEST)):
        for old in tmp_path.glob("miles"):
            shutil.rmtree(old)
        write(tmp_path, MILES, which)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", day, day=day)
    code, text = told(capsys, tmp_path)
    (loss,) = (line.split() for line in text.splitlines() if line.startswith("its policy loss"))
    assert code == 0 and loss[3] == "2026-04-01" and loss[5:7] == ["never", "2026-04-05"]
    assert "One set of addresses answered all needs for 4 to 4 days, 1 sets in all." in text
