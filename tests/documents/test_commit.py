"""Which commit ran: of the checkout itself, and whether its files are the commit's."""

import subprocess
from pathlib import Path

import pytest

from lab.provenance import measured_with
from mis_plugins.shared.provenance import UNKNOWN, commit


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "result.json").write_text("{}\n")
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    return tmp_path


def test_a_clean_checkout_is_named_by_its_commit(checkout: Path):
    asked = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert commit(checkout, ("code.py",)) == asked.stdout[:12]


def test_a_change_is_said_where_it_matters(checkout: Path):
    (checkout / "result.json").write_text("[]\n")
    assert "modified" not in commit(checkout, ("code.py",))
    (checkout / "code.py").write_text("2\n")
    assert commit(checkout, ("code.py",)).endswith(" (modified)")


def test_a_file_that_git_does_not_track_changes_nothing(checkout: Path):
    (checkout / "notes.txt").write_text("\n")
    assert "modified" not in commit(checkout, (".",))


def test_what_is_no_checkout_of_its_own_has_no_commit(checkout: Path, tmp_path_factory: pytest.TempPathFactory):
    installed = checkout / "site-packages"
    installed.mkdir()
    assert commit(installed) == commit(tmp_path_factory.mktemp("nowhere")) == UNKNOWN


def test_without_git_there_is_none(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert commit(checkout) == UNKNOWN


def test_figures_name_the_commit_of_a_peer_by_any_folder_of_it(checkout: Path):
    """A benchmark knows where the function lies that it compares with, not where its repository begins."""
    inner = checkout / "examples"
    inner.mkdir()
    found = measured_with("python it.py", (), {"baseline": inner})["baseline commit"]
    assert found == commit(checkout, (".",)) != UNKNOWN
    (checkout / "code.py").write_text("2\n")
    assert measured_with("python it.py", (), {"baseline": inner})["baseline commit"] == f"{found} (modified)"
