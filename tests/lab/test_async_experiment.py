"""The asynchronous experiment: its runs are what their names say, its figures what the runs left."""

from __future__ import annotations

import itertools
import json
import subprocess
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab import async_rewards, asynchrony
from lab.asynchrony import (
    BOUND,
    FULL,
    MEASURED,
    METHODS,
    SETTLED,
    SMOKE,
    Cell,
    Directions,
    Plan,
    cell_arm,
    command_line,
    held,
    measure_throughput,
    result,
    steady,
)
from lab.experiments.async_picture import draw
from lab.experiments.async_tables import markdown
from lab.experiments.runner import publish
from lab.host.cli.arguments import parse_args
from lab.host.folders import METRICS, SUMMARY
from mis_plugins.config.reading import from_args
from mis_plugins.shared import provenance


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


def write(content: dict[str, Any], results: Path) -> None:
    publish(results / "async", content, markdown(content), {"": partial(draw, content)})


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    plan = Plan(("1e-4",), SMOKE.bounds, SMOKE.step_seconds, 2, ())
    for seed, method in ((seed, method) for seed in (0, 1) for method in METHODS):
        leave_a_run(Cell(method, "1e-4", seed).folder(tmp_path), (0.7, 0.8)[seed])
    numbers = {"pooled": 0.9, "single": 0.5, "norm": 1.1}
    names = ("on-policy", "standard", "segment-wise", "no weights")
    measured_with = {
        "command": "bash scripts/experiment-async.sh",
        "mis-plugins commit": "0123456789ab (modified)",
    }
    rows = [
        {
            "bound": bound,
            "step_seconds": 0.0,
            "tokens_a_second": rates,
            "waiting": [0.25, 0.5],
            "recompute": [0.031] * 2,
        }
        for bound, rates in ((0, [1000.0, 2000.0]), (2, [1500.0, 2000.0]))
    ]
    throughput = {"load_before": 0.3, "processors": 2, "rows": rows, "measured_with": measured_with}
    measured = {
        "measured_with": measured_with,
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


def test_throughput_alone_is_put_into_the_results_that_are_there(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(content, tmp_path / "results")
    rates = itertools.count(100.0)
    monkeypatch.setattr(asynchrony, "run_arms", lambda *_: 0)
    measured = dict.fromkeys(("waiting", "recompute"), 0.5)
    monkeypatch.setattr(
        asynchrony, "_throughput", lambda *setting: {"tokens_a_second": next(rates), **measured}
    )
    line = f"async --smoke --throughput --results {tmp_path}/results --runs {tmp_path}/runs"
    monkeypatch.setattr("sys.argv", line.split())
    assert asynchrony.main() == 0
    found = json.loads((tmp_path / "results/async.json").read_text())
    assert [row["tokens_a_second"] for row in found["throughput"]["rows"]] == [[100.0], [101.0]]
    made_with = found["throughput"]["measured_with"]
    assert (
        made_with["command"]
        == "bash scripts/experiment-async.sh --smoke --throughput --results results --runs runs"
    )
    assert {
        "python",
        "cpu",
        "torch",
        "megatron-core",
        "mis-plugins commit",
        "load average",
    } < made_with.keys()
    others = content.keys() - {"throughput"}
    assert {name: found[name] for name in others} == json.loads(
        json.dumps({name: content[name] for name in others})
    )


def test_the_page_has_the_figures_of_the_results() -> None:
    folder = Path(__file__).resolve().parents[2] / "lab/results"
    content = json.loads((folder / "async.json").read_text())
    assert (folder / "async.md").read_text() == markdown(content), "bash scripts/experiment-async.sh --tables"


def test_a_bound_of_two_changes_the_ages_alone(tmp_path: Path) -> None:
    for weight in async_rewards.WEIGHTS:
        args = parse_args(async_rewards.words(weight, "1e-4", 1, FULL, tmp_path))
        wide = parse_args(
            [*command_line(METHODS[weight][0], "1e-4", 1, tmp_path, tmp_path), *METHODS[weight][1]]
        )
        assert (args.max_head_offpolicyness, args.rollout_steps_per_update) == (2, 3)
        own = {"max_head_offpolicyness", "rollout_steps_per_update", "output", "custom_config_path", "mis"}
        different = {name for name, value in vars(args).items() if vars(wide)[name] != value}
        assert different <= own and from_args(args) == from_args(wide)


def test_the_page_of_the_lower_bound_has_its_figures() -> None:
    folder = Path(__file__).resolve().parents[2] / "lab/results"
    content = json.loads((folder / "async_rewards.json").read_text())
    assert (folder / "async_rewards.md").read_text() == async_rewards.markdown(content)
    assert {len(runs) for methods in content["rewards"].values() for runs in methods.values()} == {3}


def test_throughput_alone_needs_results(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no .*async.json; run the whole experiment first"):
        held(tmp_path / "async.json")


def test_rounds_are_of_all_settings_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []

    def read(bound: int, step: float, root: Path) -> dict[str, float]:
        asked.append((bound, step))
        return {"tokens_a_second": float(len(asked))}

    started: list[int] = []
    monkeypatch.setattr(asynchrony, "_throughput", read)
    monkeypatch.setattr(asynchrony, "run_arms", lambda arms, processes, code: started.append(len(arms)) or 0)
    code, found = measure_throughput(Plan(("1e-4",), (0, 2), (0.0, 0.1), 1, (), rounds=2), tmp_path)
    assert code == 0 and started == [4, 4], "a round at a time"
    rows = found["rows"]
    settings = [(0, 0.0), (2, 0.0), (0, 0.1), (2, 0.1)]
    assert asked == settings * 2
    assert [(row["bound"], row["step_seconds"]) for row in rows] == settings
    assert [row["tokens_a_second"] for row in rows] == [[1, 5], [2, 6], [3, 7], [4, 8]]


@pytest.mark.parametrize("bound", [0, 8])
def test_throughput_is_of_the_rollouts_with_work_left_to_begin(bound: int) -> None:
    records = [{"rollout": rollout} for rollout in range(SETTLED + MEASURED + bound)]
    assert [one["rollout"] for one in steady(records, bound)] == list(range(SETTLED, SETTLED + MEASURED))
    assert steady(records[:3], bound) == records[:3], "a smoke run is too short"


@pytest.mark.parametrize(
    "change", [{"bias_rollouts": 3}, {"flags": ("--adam-beta1", "0.8")}, {"rates": ("1e-4",)}]
)
def test_directions_of_other_settings_are_measured_again(change: dict[str, Any], tmp_path: Path) -> None:
    """Whatever their settings their file has one name; what does not concern them repeats nothing."""
    one, other = (Directions("1e-4", 0, tmp_path, plan) for plan in (FULL, replace(FULL, **change)))
    assert one.file == other.file
    one.arm().stamp("a")
    assert other.arm().made("a") == ("rates" in change)


def test_a_smoke_run_is_not_taken_for_a_full_one(tmp_path: Path) -> None:
    full, smoke = (cell_arm(Cell("standard", "3e-4", 0), plan, tmp_path) for plan in (FULL, SMOKE))
    smoke.stamp("a")
    assert smoke.folder == full.folder and smoke.made("a") and not full.made("a")


def test_throughput_is_what_the_steady_rollouts_of_a_run_give(tmp_path: Path) -> None:
    """By hand: 20 rollouts of 30 tokens and 4 s, of which 1 s waiting and 0.5 s recompute; the others would show."""
    arm = asynchrony._throughput_arm(FULL, 2, 0.05, tmp_path)
    steady = {"staleness/tokens": 30, "seconds": 4.0, "wait_seconds": 1.0, "recompute/seconds": 0.5}
    other = dict.fromkeys(steady, 1000.0)
    rows = [other] * SETTLED + [steady] * MEASURED + [other] * 2
    (arm.folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = asynchrony._throughput(2, 0.05, tmp_path)
    assert found == {"tokens_a_second": 7.5, "waiting": 0.25, "recompute": 0.125}
    args = Namespace(**arm.settings)
    assert (args.asynchronous, args.max_head_offpolicyness, args.rollout_step_seconds) == (True, 2, 0.05)
    assert args.num_rollout == SETTLED + MEASURED + 2
    assert args.output == str(tmp_path / "throughput/bound2-step0.05")


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
