"""The driver that runs every preset: each one end to end in a tiny run, what the results hold."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from commands import ran

from lab import presets
from lab.host.cli.arguments import parse_args
from lab.host.folders import METRICS, SUMMARY
from mis_plugins.config import reading

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ("trainer_start", "trainer_final", "rollout_start", "rollout_final", "k3_kl", "ess", "kept")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    done = ran("-m", "lab.presets", "--smoke", "--runs", folder / "runs", "--results", folder, seconds=900)
    assert done.returncode == 0, done.stderr
    return folder


def numbers(folder: Path) -> dict[str, dict[str, float]]:
    found = json.loads((folder / "presets.json").read_text())["presets"]
    return {name: {key: one[key] for key in NUMBERS} for name, one in found.items()}


def test_every_preset_runs_end_to_end(smoke: Path):
    found = numbers(smoke)
    routed = ("route", "route-down-weigh")  # the policy is dense
    without_routes = [name for name in reading.presets() if name not in routed]
    assert list(found) == [*presets.BASELINES, *without_routes]
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


# -------------------------------------------------------------------------------------------------- without a run


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
    found = presets.read(tmp_path / "opsm")
    assert (found["ess"], found["kept"]) == (ess, kept)


def leave(case: presets.Case, runs: Path) -> None:
    """A finished run of a case, with numbers of no meaning."""
    folder = case.arm("", runs).folder
    folder.mkdir(parents=True)
    summary = dict.fromkeys((*NUMBERS, "kept_fraction", "seconds"), 0.5)
    (folder / SUMMARY).write_text(json.dumps(summary))
    (folder / METRICS).write_text(json.dumps({"rollout": 0}) + "\n")


@pytest.mark.parametrize("code", [0, 130])
def test_results_hold_what_is_finished_in_the_order_of_the_table(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others than the selected stay, and so does what an interrupt left unfinished."""
    known = {case.name: case for case in presets.cases()}
    options = Namespace(runs=tmp_path, results=tmp_path / "results", processes=2)

    def finishes(count: int) -> None:
        monkeypatch.setattr(
            presets, "run_arms", lambda arms, *_: [arm.stamp("a") for arm in arms[:count]] and code
        )

    leave(known["opsm"], tmp_path)
    leave(known["uncorrected"], tmp_path)
    finishes(1)
    assert presets.measure(options, [known["opsm"]], presets.RECIPE) == code
    assert presets.measure(options, [known["uncorrected"], known["tis"]], presets.RECIPE) == code
    found = json.loads((options.results / "presets.json").read_text())["presets"]
    assert list(found) == ["uncorrected", "opsm"]
    row = "| uncorrected | 0.50 | 0.50 | 0.500 | 0.50 | 0.50 | no hook, int3"
    assert row in (options.results / "presets.md").read_text()


def test_a_preset_that_changed_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "tis.yaml"
    file.write_text("# one\nmis: {weight: {level: token, bound: truncate, upper: 2}}\n")
    case = presets.Case("tis", file)
    case.arm(presets.RECIPE, tmp_path).stamp("a")
    assert case.arm(presets.RECIPE, tmp_path).made("a")
    assert not case.arm(presets.RECIPE + " --smoke", tmp_path).made("a")
    file.write_text("# one\nmis: {weight: {level: token, bound: truncate, upper: 3}}\n")
    assert not case.arm(presets.RECIPE, tmp_path).made("a")


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
