"""The asynchronous experiment: its runs are what their names say, its figures what the runs left."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from mis_plugins.local.arguments import parse_args
from mis_plugins.local.asynchronous.experiment import (
    BOUND,
    FULL,
    MEASURED,
    METHODS,
    SEEDS,
    SETTLED,
    SMOKE,
    Cell,
    Plan,
    cell_arguments,
    cells,
    command_line,
    publish,
    result,
    steady,
)
from mis_plugins.local.asynchronous.tables import spread
from mis_plugins.local.folders import add_folders, with_folders
from mis_plugins.local.report import METRICS, SUMMARY, finished, write_json
from mis_plugins.reading import from_args


@pytest.mark.parametrize("method", METHODS)
def test_every_run_parses_to_what_its_name_says(method: str, tmp_path: Path) -> None:
    config, flags = METHODS[method]
    args = parse_args([*command_line(config, "1e-4", 2, tmp_path / "run", tmp_path), *flags])
    assert (args.lr, args.seed, args.loss_type) == (1e-4, 2, "custom_loss")
    assert args.asynchronous == (method != "synchronous")
    assert from_args(args).segment_wise_on == (method != "standard")
    if args.asynchronous:
        assert args.max_head_offpolicyness == BOUND == 8
        assert args.rollout_steps_per_update * (BOUND + 1) >= args.num_digits + 1, "all of a sequence in time"


def test_without_weights_the_loss_is_the_hosts_own(tmp_path: Path) -> None:
    args = parse_args(command_line(None, "1e-4", 0, tmp_path / "run", tmp_path))
    assert args.loss_type == "policy_loss" and not args.use_tis


def test_there_are_three_seeds_and_three_rates() -> None:
    assert len(SEEDS) >= 3 and len(FULL.rates) >= 3
    found = cells(FULL, SEEDS)
    assert len({cell.folder(Path()) for cell in found}) == len(found) == 3 * len(SEEDS) * len(FULL.rates)
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)


def leave_a_run(folder: Path, reward: float) -> None:
    summary: dict[str, Any] = {"status": "finished", "recompute/share": 0.1}
    summary["arguments"] = {"rollout_batch_size": 4, "n_samples_per_prompt": 2}
    for suffix, wise, standard in (("", 0.02, 0.4), ("/age_0", 0.01, 0.01), ("/age_2", 0.03, 0.6)):
        summary[f"behav_imp_weight/var/segment_wise{suffix}"] = wise
        summary[f"behav_imp_weight/var/standard{suffix}"] = standard
        summary[f"staleness/tokens{suffix}"] = 40 if suffix else 80
    rows: list[dict[str, Any]] = [
        {"rollout": 0, "eval_trainer": 0.5, "response_length": 5.0},
        {"rollout": 1, "response_length": 6.0, "staleness/tokens/age_2": 10,
         "loglinear/error/rms/age_2": 3.0, "loglinear/error/step_rms/age_2": 6.0},
        {"rollout": 2, "eval_trainer": reward, "response_length": 5.0, "staleness/tokens/age_2": 30,
         "loglinear/error/rms/age_2": 5.0, "loglinear/error/step_rms/age_2": 6.0},
    ]  # fmt: skip
    folder.mkdir(parents=True)
    (folder / SUMMARY).write_text(json.dumps(summary))
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    plan = Plan(("1e-4",), SMOKE.bounds, SMOKE.step_seconds, 2, ())
    for seed, method in ((seed, method) for seed in (0, 1) for method in METHODS):
        leave_a_run(Cell(method, "1e-4", seed).folder(tmp_path), (0.7, 0.8)[seed])
    numbers = {"pooled": 0.9, "single": 0.5, "norm": 1.1}
    names = ("on-policy", "standard", "segment-wise", "no weights")
    throughput = [
        {"bound": bound, "step_seconds": 0.0, "tokens_a_second": rate, "waiting": 0.25, "recompute": 0.031}
        for bound, rate in ((0, 1000.0), (2, 1500.0))
    ]
    measured = {
        "bias_rollouts": 2,
        "bias": {"1e-4": [dict.fromkeys(names, numbers)] * 2},
        "throughput": throughput,
    }
    return {**result(plan, tmp_path, (0, 1)), **measured}


def test_figures_are_those_of_the_runs(content: dict[str, Any]) -> None:
    run = content["variance"]["1e-4"][0]
    assert set(run) == {"all", "0", "2"}, "ages without a token have no row"
    assert run["2"] == {"segment-wise": 0.03, "standard": 0.6, "tokens": 40}
    assert content["rewards"]["1e-4"]["standard"] == [[(0.0, 0.5), (88.0, 0.7)], [(0.0, 0.5), (88.0, 0.8)]]
    error = content["loglinear"]["1e-4"][0]["2"]
    assert error["rms"] == pytest.approx(((9 * 10 + 25 * 30) / 40) ** 0.5) and error[
        "step_rms"
    ] == pytest.approx(6)
    assert content["recompute_share"] == {"1e-4": [0.1, 0.1]}


def test_tables_and_picture(content: dict[str, Any], tmp_path: Path) -> None:
    publish(content, tmp_path / "results")
    text = (tmp_path / "results/async.md").read_text()
    assert "| 2 | 0.03 [0.03, 0.03] | 0.6 [0.6, 0.6] | 20.0 [20.0, 20.0] | 80 |" in text
    assert "| segment-wise | 0.900 [0.900, 0.900] | 0.500 [0.500, 0.500] | 1.100 [1.100, 1.100] |" in text
    assert "| 1e-4 | 0.50 [0.50, 0.50] | 0.75 [0.70, 0.80] | 0.75 [0.70, 0.80] | 0.75 [0.70, 0.80] |" in text
    assert "| 0 s | 2 | 1500 | 1.50 | 1.33 | 25% | 3.1% |" in text and "of the mean over 2 rollouts" in text
    assert (tmp_path / "results/async.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results/async.json").read_text())["seeds"] == [0, 1]


def test_a_spread_is_mean_smallest_and_largest() -> None:
    assert spread([1.0, 2.0, 6.0]) == "3 [1, 6]" and spread([]) == "-"


@pytest.mark.parametrize("bound", [0, 8])
def test_throughput_is_of_the_rollouts_with_work_left_to_begin(bound: int) -> None:
    records = [{"rollout": rollout} for rollout in range(SETTLED + MEASURED + bound)]
    assert [one["rollout"] for one in steady(records, bound)] == list(range(SETTLED, SETTLED + MEASURED))
    assert steady(records[:3], bound) == records[:3], "a smoke run is too short"


@pytest.mark.parametrize("name", ["async", "collapse"])
def test_a_smoke_run_writes_nothing_where_a_full_one_looks(name: str) -> None:
    def folders(line: str) -> tuple[Path, Path]:
        parser = ArgumentParser()
        parser.add_argument("--smoke", action="store_true")
        add_folders(parser, name)
        found = with_folders(parser.parse_args(line.split()), name)
        return found.runs, found.results

    assert folders("") == (Path("runs") / name, Path("benchmarks/results"))
    assert folders("--smoke") == (Path(f"runs/{name}-smoke"),) * 2
    assert folders("--smoke --runs a --results b") == (Path("a"), Path("b"))


def test_a_finished_run_of_other_arguments_is_run_again(tmp_path: Path) -> None:
    def left(plan: Plan, status: str) -> None:
        arguments = vars(cell_arguments(cell, plan, tmp_path))
        write_json(folder / SUMMARY, {"status": status, "arguments": arguments})

    cell = Cell("standard", "3e-4", 0)
    folder = cell.folder(tmp_path)
    wanted = cell_arguments(cell, FULL, tmp_path)
    assert not finished(wanted)
    for plan, status, expected in (
        (FULL, "finished", True), (FULL, "interrupted", False), (SMOKE, "finished", False)
    ):  # fmt: skip
        left(plan, status)
        assert finished(wanted) == expected
