"""The recipe of the demonstration, and the tables of the collapse experiment."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from lab.collapse import (
    COSINE_METHODS,
    COSINE_PRECISIONS,
    COSINES,
    Cell,
    arms,
    cells,
    cosine_folder,
    directions,
    read_summary,
    result,
    write_results,
)
from lab.demo import RUNS
from lab.experiments.recipe import ESTIMATORS, METHODS, command_line
from lab.host.cli.arguments import parse_args
from lab.host.folders import METRICS, SUMMARY
from lab.host.report import write_json
from mis_plugins.config.reading import from_args


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("method", METHODS)
def test_every_run_of_the_experiment_parses_to_what_its_name_says(
    method: str, estimator: str, tmp_path: Path
) -> None:
    args = parse_args(command_line(method, estimator, 3, tmp_path))
    assert args.num_rollout >= 200 and args.seed == 3
    assert (args.rollout_weights == "fp32") == (method == "matched")
    assert args.advantage_estimator == ("grpo" if estimator == "group" else "reinforce")
    assert args.use_tis == (METHODS[method] is not None)
    if args.use_tis:
        config = from_args(args)
        assert config.weight is not None
        assert (config.weight.level == "sequence") == (method == "sequence")
        assert bool(config.reject) == ("geometric" in method)
        assert (config.weight.normalize is not None) == ("BN" in method)


def test_the_demonstration_differs_in_the_correction_alone(tmp_path: Path) -> None:
    plain, corrected = (vars(parse_args(command_line(RUNS[name], "R-1", 0, tmp_path))) for name in RUNS)
    differing = {key for key in corrected if corrected[key] != plain.get(key)}
    assert differing == {"use_tis", "custom_tis_function_path", "custom_config_path", "mis"}


def leave_a_run(folder: Path, final: float, status: str = "finished") -> None:
    numbers = {"trainer_start": 0.9, "trainer_final": final, "rollout_start": 0.5, "rollout_final": final / 2}
    rest = {
        "collapsed": final < 0.45,
        "k3_kl": 0.25,
        "kept_fraction": 0.5,
        "grad_cosine": None,
        "rollouts": 1,
    }
    folder.mkdir(parents=True)
    (folder / SUMMARY).write_text(json.dumps({**numbers, **rest, "status": status}))
    record = {
        "rollout": 0,
        "eval_trainer": final,
        "eval_rollout": final / 2,
        "k3_kl": 0.25,
        "kept_fraction": 0.5,
    }
    (folder / METRICS).write_text(json.dumps(record) + "\n")


def test_an_interrupted_run_is_not_taken_for_a_finished_one(tmp_path: Path) -> None:
    leave_a_run(tmp_path / "a", 0.5)
    leave_a_run(tmp_path / "b", 0.5, status="interrupted")
    assert read_summary(tmp_path / "a") is not None
    assert read_summary(tmp_path / "b") is None and read_summary(tmp_path / "c") is None


def test_the_tables_hold_every_seed(tmp_path: Path) -> None:
    seeds = (0, 1, 2)
    for cell in cells(seeds):
        leave_a_run(cell.folder(tmp_path / "runs"), 0.1 + 0.3 * cell.seed)
    precision = {method: 0.5 for method in COSINE_METHODS} | {"k3_kl": 1e-3}
    one = {"on-policy": {"agreement": 0.9, "reward": 0.5}, **{name: precision for name in COSINE_PRECISIONS}}
    for folder in (cosine_folder(seed, name, tmp_path / "runs") for name in ESTIMATORS for seed in seeds):
        folder.mkdir(parents=True)
        write_json(folder / COSINES, one)
    made_with = {"command": "bash scripts/experiment-collapse.sh", "torch": "9.9"}
    options = Namespace(runs=tmp_path / "runs", results=tmp_path / "results", seeds=seeds)
    numbers = result(options.runs, seeds, directions(options.runs, seeds))
    write_results(options, {"measured_with": made_with, **numbers})
    table = (tmp_path / "results/collapse.md").read_text()
    row = (
        "| 0.90, 0.90, 0.90 | 0.10, 0.40, 0.70 | 0.50, 0.50, 0.50 | 0.05, 0.20, 0.35 | 2 of 3 | 0.25 | 0.5 |"
    )
    assert table.count(row) == len(METHODS) * len(ESTIMATORS)
    assert table.count("| int3 | 1.0e-03 | 0.500 |") == len(ESTIMATORS)
    content = json.loads((tmp_path / "results/collapse.json").read_text())
    assert len(content["runs"]["R-1"]["sequence"]) == 3
    assert content["measured_with"] == made_with and "| torch | 9.9 |" in table
    for picture in ("collapse.png", "collapse-group.png"):
        assert (tmp_path / "results" / picture).read_bytes().startswith(b"\x89PNG")


def test_every_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    everything = cells((0, 1, 2))
    assert len(everything) == 30 == len({cell.folder(tmp_path) for cell in everything})
    assert Cell("token TIS", "R-1", 0) in everything


def test_arms_are_the_runs_and_the_directions(tmp_path: Path) -> None:
    full, smoke = (arms(Namespace(runs=tmp_path, seeds=(0,), smoke=smoke)) for smoke in (False, True))
    assert len(full) == 12 == len({arm.folder for arm in full})
    for one, other in zip(full, smoke, strict=True):
        one.stamp("a")
        assert one.made("a") and not other.made("a"), "settings of a full run"
    assert set(full[-1].settings) == set(COSINE_METHODS)
