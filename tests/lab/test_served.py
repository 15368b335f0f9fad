"""Which commits of a host are served: a small history read from git, and the page made of the record."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from test_checkout import LOSSES, MILES, RAN, write

from lab import served
from lab.pages import parts
from lab.pages.served import part
from mis_plugins import __version__

CALL = "def policy_loss_function"


def committed(root: Path, day: str) -> str:
    stamp = f"{day}T12:00:00"
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", day, "--date", stamp)):
        environment = {"PATH": "/usr/bin:/bin", "GIT_COMMITTER_DATE": stamp}
        subprocess.run(["git", *words], cwd=root, env=environment, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    return f"{head.stdout[:9]} of {day}"


def test_a_hook_works_since_the_commit_that_answered_its_last_need(tmp_path: Path) -> None:
    """Found, lost, and found again: the last one counts, and what does not work at the end has no row."""
    file = write(tmp_path, MILES, RAN) / LOSSES
    whole = file.read_text()
    first = committed(tmp_path, "2026-04-01")
    file.write_text(whole.replace(CALL, "def renamed"))
    committed(tmp_path, "2026-04-02")
    file.write_text(whole)
    again = committed(tmp_path, "2026-04-03")
    shutil.rmtree(tmp_path / "miles/rollout")
    last = committed(tmp_path, "2026-04-04")
    _, found = served.served(tmp_path)
    assert (found["from"], found["to"]) == (first, last)
    assert found["hooks"]["true_on_policy.hosts.policy_loss"] == again
    assert found["hooks"]["report_step"] == first and "generate_with_versions" not in found["hooks"]


def test_the_page_is_current_and_tells_of_this_version() -> None:
    assert parts.named("hosts.md") and parts.current("hosts.md", part), "python -m lab.pages.served"
    assert __version__ in json.loads(served.RECORD.read_text(encoding="utf-8"))["versions"]


def test_a_folder_without_a_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of"):
        served.served(tmp_path)
