"""Where runs write: a run never goes over an earlier one, nor its checkpoint over another run's."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from lab.host.folders import CHECKPOINT, METRICS, SUMMARY, run_folder, unused
from mis_plugins.errors import ConfigError
from true_on_policy.hosts.config import BitwiseConfig


def a_run(folder: Path, save: Path | None = None, name: str = SUMMARY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"arguments": {"save": save and str(save)}}))
    return folder


def a_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / CHECKPOINT).write_bytes(b"weights")
    return folder


def chosen(output: Path, save: Path | None = None, load: Path | None = None) -> Path:
    given = {key: value and str(value) for key, value in (("output", output), ("save", save), ("load", load))}
    return run_folder(Namespace(**given))


@pytest.mark.parametrize("name", [METRICS, SUMMARY])
def test_a_folder_that_holds_a_run_is_left_to_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = a_run(tmp_path / "run", name=name)
    assert chosen(first) == tmp_path / "run-2"
    assert f"{first} holds an earlier run; the new one goes to {tmp_path / 'run-2'}" in capsys.readouterr().err


def test_a_free_folder_is_taken_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    assert chosen(tmp_path / "run") == tmp_path / "run"
    assert chosen(tmp_path / "deep/new") == tmp_path / "deep/new"
    assert (tmp_path / "deep/new").is_dir()
    assert capsys.readouterr().err == ""


def test_numbers_go_on_where_folders_are_taken(tmp_path: Path) -> None:
    """An empty folder is free; whatever else stands there is somebody's, run or not."""
    first = a_run(tmp_path / "run")
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2/notes.txt").write_text("mine")
    (tmp_path / "run-3").write_text("a file")
    (tmp_path / "run-4").mkdir()
    assert unused(first) == tmp_path / "run-4"


def test_a_run_of_several_parts_is_seen_by_any_of_them(tmp_path: Path) -> None:
    a_run(tmp_path / "demo/corrected")
    assert unused(tmp_path / "demo", ("uncorrected", "corrected")) == tmp_path / "demo-2"
    assert unused(tmp_path / "demo", ("uncorrected",)) == tmp_path / "demo"


def test_a_checkpoint_of_another_run_is_not_written_over(tmp_path: Path) -> None:
    saved = a_checkpoint(tmp_path / "saved")
    for other in (None, a_checkpoint(tmp_path / "other")):
        with pytest.raises(ConfigError, match=f"--save {saved}: holds the checkpoint of an earlier run"):
            chosen(tmp_path / "run", saved, other)
    assert not (tmp_path / "run").exists(), "refused before anything is made"
    assert (saved / CHECKPOINT).read_bytes() == b"weights"


def test_a_run_is_resumed_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever spelling of the checkpoint's folder; a killed run, which left no summary, likewise."""
    saved = a_checkpoint(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    run, killed = a_run(tmp_path / "run", saved), a_run(tmp_path / "killed", name=METRICS)
    assert chosen(run, saved, Path("saved")) == run
    assert chosen(killed, saved, saved) == killed
    assert chosen(run, load=a_checkpoint(tmp_path / "other")) == tmp_path / "run-2", "another run's checkpoint"


def test_samples_of_the_bitwise_comparison_lie_in_the_folder_of_the_run(tmp_path: Path) -> None:
    """Under --output, which a host lacks: there beside the checkpoints; `bitwise.folder` wins over both."""
    folder, save = chosen(a_run(tmp_path / "run")), str(tmp_path / "saved")
    given = Namespace(output=str(folder), save=save)
    assert BitwiseConfig().place(given) == tmp_path / "run-2/bitwise"
    assert BitwiseConfig().place(Namespace(save=save)) == tmp_path / "saved/bitwise"
    assert BitwiseConfig(folder="mine").place(given) == Path("mine")
