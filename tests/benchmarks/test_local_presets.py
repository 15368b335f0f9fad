"""The driver that runs every preset: each one end to end in a tiny run, what is resumed, what an interrupt leaves."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import presets
import pytest

from mis_plugins.config import reading
from mis_plugins.local.cli.arguments import parse_args
from mis_plugins.local.folders import METRICS, SUMMARY
from mis_plugins.local.train.parallel import EXIT_INTERRUPTED

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ("trainer_start", "trainer_final", "rollout_start", "rollout_final", "k3_kl", "ess", "kept")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    command = [sys.executable, str(ROOT / "benchmarks/presets.py"), "--smoke", "--runs", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder


def numbers(folder: Path) -> dict[str, dict[str, float]]:
    found = json.loads((folder / "presets.json").read_text())["presets"]
    return {name: {key: one[key] for key in NUMBERS} for name, one in found.items()}


def test_every_preset_runs_end_to_end(smoke: Path):
    found = numbers(smoke)
    assert list(found) == [*presets.BASELINES, *reading.presets()]
    for name, one in found.items():
        assert all(math.isfinite(value) for value in one.values()), name
        assert 0 <= one["kept"] <= 1 + 1e-6 and 0 <= one["ess"] <= 1 + 1e-6, name
        assert (one["k3_kl"] > 1e-4) == (name != "matched precision"), name


def test_equal_formulas_give_equal_runs(smoke: Path):
    """Other names for one correction, and files that change nothing: the same numbers to the last digit."""
    found = numbers(smoke)
    for first, *others in (
        ("uncorrected", "metrics-only", "miles-blog-dense-1", "verl-disabled"),
        ("tis", "verl-decoupled-token-is", "miles-blog-dense-2", "nemo-rl-tis", "ms-swift-token-truncate"),
    ):
        assert all(found[name] == found[first] for name in others), first
    assert found["tis"] != found["uncorrected"]


def test_table_and_picture_hold_every_preset(smoke: Path):
    table = (smoke / "presets.md").read_text()
    assert all(f"\n| {name} | " in table for name in numbers(smoke))
    assert table.count("\n| ") - len(numbers(smoke)) < 10
    assert (smoke / "presets.png").read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------------------------------------- without a run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the cases that would have run; each run succeeds at once."""
    done: list[str] = []
    one = dict.fromkeys((*NUMBERS, "seconds"), 0.5)
    monkeypatch.setattr(presets, "run", lambda case, recipe, runs: done.append(case.name) or 0)
    monkeypatch.setattr(presets, "read", lambda case, runs: one)
    return done


@pytest.mark.parametrize(
    ("kept_fraction", "row", "ess", "kept"),
    [
        (None, {}, 1.0, 1.0),  # no hook
        (None, {"opsm_clipfrac": 0.25}, 0.75, 0.75),
        (0.5, {"mis_ess_mb": 0.375}, 0.375, 0.5),
        (0.5, {"mis_ess_mb": 0.375, "opsm_clipfrac": 0.25}, 0.375, 0.25),
    ],
)
def test_of_weights_that_are_all_1_what_is_kept_is_the_effective_size(
    kept_fraction: float | None, row: dict, ess: float, kept: float, tmp_path: Path
):
    summary = dict.fromkeys(
        ("trainer_start", "trainer_final", "rollout_start", "rollout_final", "k3_kl"), 0.5
    )
    (tmp_path / "opsm").mkdir()
    (tmp_path / "opsm" / SUMMARY).write_text(
        json.dumps({**summary, "kept_fraction": kept_fraction, "seconds": 1.0})
    )
    (tmp_path / "opsm" / METRICS).write_text(json.dumps({"rollout": 0, **row}) + "\n")
    found = presets.read(presets.Case("opsm"), tmp_path)
    assert (found["ess"], found["kept"]) == (ess, kept)


def some() -> list[presets.Case]:
    return [case for case in presets.cases() if case.name in ("uncorrected", "tis", "opsm")]


def names(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["presets"])


def test_what_the_json_holds_is_not_run_again(runs: list[str], tmp_path: Path):
    path = tmp_path / "presets.json"
    assert presets.measure(some()[1:], "recipe", tmp_path, path, "code") == 0
    assert presets.measure(some(), "recipe", tmp_path, path, "code") == 0
    assert runs == ["opsm", "tis", "uncorrected"]
    assert names(path) == ["uncorrected", "opsm", "tis"], "in the order of the table, whichever ran first"


def test_another_recipe_another_file_or_other_code_is_run_again(runs: list[str], tmp_path: Path):
    path, file = tmp_path / "presets.json", tmp_path / "tis.yaml"
    file.write_text("# one\nmis: {weight: {upper: 2}}\n")
    case = presets.Case("tis", file)
    for recipe, code in (
        ("one", "a"),
        ("one", "a"),
        ("two", "a"),
        ("two", "b"),
        ("two", None),
        ("two", None),
    ):
        presets.measure([case], recipe, tmp_path, path, code)
    assert len(runs) == 5, "twice the same of named code, and never of code without a name"
    file.write_text("# two\nmis: {weight: {upper: 3}}\n")
    presets.measure([case], "two", tmp_path, path, "b")
    assert len(runs) == 6
    assert json.loads(path.read_text())["presets"]["tis"]["formula"] == "two"


def test_an_interrupt_keeps_what_was_finished(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, codes = tmp_path / "presets.json", iter((0, EXIT_INTERRUPTED))
    monkeypatch.setattr(presets, "run", lambda case, recipe, runs: next(codes))
    assert presets.measure(some(), "recipe", tmp_path, path, "code") == EXIT_INTERRUPTED
    assert "opsm: interrupted" in capsys.readouterr().err
    assert names(path) == ["uncorrected"]
    presets.publish(path)
    assert (
        "| uncorrected | 0.50 | 0.50 | 0.500 | 0.50 | 0.50 | no hook, int3"
        in path.with_suffix(".md").read_text()
    )


@pytest.mark.parametrize("case", presets.cases(), ids=lambda case: case.name)
def test_each_file_gets_the_hook_that_can_serve_it(case: presets.Case):
    args: Any = parse_args([*presets.RECIPE.split(), *case.flags])
    assert args.rollout_weights == ("fp32" if case.name == "matched precision" else "int3")
    config = presets.load(case.file) if case.file else None
    assert (args.loss_type == "custom_loss") == (config is not None and config.needs_loss_hook)
    assert args.use_tis == (config is not None and config.corrects and not config.needs_loss_hook)
    assert args.get_mismatch_metrics == (
        config is not None and not config.corrects and not config.needs_loss_hook
    )
