"""The recipe of a mixture of experts: what each arm is, its page, and a tiny run of two arms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lab import experts
from lab.experts import METHODS, arms, command_line, folder, main, markdown
from lab.host.cli.arguments import parse_args
from mis_plugins.config.reading import from_args

BLOG = ("blog 1", "blog 2", "blog 3", "blog 4")


@pytest.mark.parametrize("name", METHODS)
def test_each_arm_parses_to_what_its_name_says(name: str, tmp_path: Path) -> None:
    args = parse_args(command_line(name, 3, tmp_path, smoke=False))
    assert (args.num_experts, args.moe_router_topk, args.seed) == (8, 2, 3)
    assert args.true_on_policy == (args.rollout_weights == "fp32") == (name == "truly on policy")
    assert args.use_rollout_routing_replay == (name in ("route", "R3", "R3 + TIS"))
    assert args.use_tis == (name in ("token TIS", "route", "R3 + TIS", *BLOG))
    config = from_args(args)
    assert config.reads_routes == (name == "route")
    assert config.routing is None or config.routing.experts == "trainer"
    if name in BLOG:
        assert config.weight is not None and config.weight.upper == (2.0 if name == "blog 1" else 1.5)
        assert bool(config.reject) == (name != "blog 4")
        assert (config.weight.normalize is not None) == (name in ("blog 1", "blog 2"))


def test_an_interrupted_experiment_holds_whole_comparisons(tmp_path: Path) -> None:
    folders = [arm.folder for arm in arms(tmp_path, (0, 1), smoke=True)]
    assert folders == [folder(tmp_path, name, seed) for seed in (0, 1) for name in METHODS]
    assert len(set(folders)) == 20


def run(fall: bool) -> dict[str, object]:
    rewards = {"trainer_start": 0.9, "trainer_final": 0.1 if fall else 0.8, "rollout_final": 0.7}
    return {**rewards, "collapsed": fall, "k3_kl": 0.02, "kept_fraction": 0.5, "cosines": [[0, 0.25, 0.5]]}


@pytest.mark.parametrize("fall", [False, True])
def test_the_page_says_which_arms_fell(fall: bool) -> None:
    runs = {"uncorrected": [run(fall), run(False)], "R3": [run(False), run(False)]}
    where = {"command": "it", "commit": "abc"}
    page = markdown({"recipe": "--x", "seeds": [0, 1], "runs": runs, "measured_with": where})
    assert ("No arm collapsed" in page) != fall
    assert ("uncorrected (1 of 2)" in page) == fall
    assert (
        "| R3 | the engine's routes replayed | 0.90, 0.90 | 0.80, 0.80 | 0.70, 0.70 | 0.02 | 0.5 | 0.25 (0.50) |"
        in page
    )


def test_a_tiny_run_writes_record_page_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "METHODS", {name: METHODS[name] for name in ("route", "R3")})
    words = f"experts.py --smoke --seeds 0 --processes 1 --runs {tmp_path}/runs --results {tmp_path}/results"
    monkeypatch.setattr(sys, "argv", words.split())
    assert main() == 0
    record = json.loads((tmp_path / "results" / "experts.json").read_text())
    assert {name: len(runs) for name, runs in record["runs"].items()} == {"route": 1, "R3": 1}
    assert all(len(runs[0]["cosines"]) == 1 for runs in record["runs"].values())
    assert (tmp_path / "results" / "experts.png").stat().st_size > 1000
    assert "Made by `python -m lab.experts`" in (tmp_path / "results" / "experts.md").read_text()
