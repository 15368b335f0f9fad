"""R3 in the embedded host: the trainer takes the engine's routes, our watch sees that it does, and a fault raises."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_local_loop import TIS_HOOK, configured, numbers, records, run, small
from test_local_parallel import strong_weights
from test_local_true_on_policy import EXPERTS, PUSHED

from lab.host.folders import STEPS
from lab.host.loop import Loop
from lab.host.model.replay import ROUTES, rows_of
from lab.host.rollout.sampler import shard
from lab.host.train.batch import pack
from lab.host.train.parallel import initialize, launch
from mis_plugins.config.loading import preset_path
from mis_plugins.config.terms.divergence import k3
from mis_plugins.errors import InputError

R3 = f"{EXPERTS} --num-layers 3 {PUSHED} --use-rollout-routing-replay"
WATCHED = "--custom-megatron-before-log-prob-hook-path mis_plugins.mis.watch_routes"
RAISES = "weight: {level: token, bound: truncate, upper: 2.0}, routing: {on_fault: raise}"
DIFFERS = "train/mis_step/route_differs"


def steps(output: Path) -> list[dict[str, float]]:
    """What the watch logged of each step."""
    found = [json.loads(line) for line in (output / STEPS).read_text().splitlines()]
    return [one for one in found if DIFFERS in one]


def watched(flags: str, output: Path, config: str = RAISES, **settings: int) -> int:
    """A run of three rollouts, two steps each, that stops where the watch finds a fault."""
    file = configured(output.with_suffix(".yaml"), f"{{{config}}}")
    hooks = f"{WATCHED} --custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step {TIS_HOOK} {file}"
    return run(f"{R3} {hooks} {flags}", output, **{"micro_batch_size": 4, **settings})


def mismatch(loop: Loop, replays: bool) -> float:
    """The k3 a token of what the engine samples, with its routes or with the routers' own."""
    log_ratios = []
    for rollout in loop.pool(loop.engine, "measured"):
        data = shard(loop.args, loop.state, rollout)
        if not replays:
            del data[ROUTES]
        log_ratios.append(torch.cat(loop.trainer.log_probs(data)) - torch.cat(data["rollout_log_probs"]))
    return float(k3(torch.cat(log_ratios)).mean())


def test_replay_takes_most_of_the_mismatch_away(tmp_path: Path) -> None:
    args = small(f"{R3} --warmup-steps 1", tmp_path / "run")

    def main() -> None:
        loop = Loop(args, initialize(1, 1))
        weights = strong_weights(args)
        loop.trainer.load_weights(weights)
        loop.engine.update_weights(weights, 0)
        found = {replays: mismatch(loop, replays) for replays in (False, True)}
        assert found[True] < found[False] / 3, found  # 10 to 27 times in three seeds

    assert launch(1, main) == 0


@pytest.mark.parametrize("flags", ["--data-parallel-size 2", "--context-parallel-size 2"])
def test_what_is_replayed_is_what_the_engine_recorded(flags: str, tmp_path: Path) -> None:
    assert watched(flags, tmp_path / "run") == 0
    seen = steps(tmp_path / "run")
    assert [one["train/step"] for one in seen] == list(range(6)), "of the passes since the step before"
    assert all(0 <= one[DIFFERS] < 0.5 for one in seen)
    assert {f"{DIFFERS}/layer_0", f"{DIFFERS}/layer_2"} <= seen[0].keys()


def test_truly_on_policy_no_token_is_routed_otherwise(tmp_path: Path) -> None:
    # A second step of a rollout would start from other parameters than the engine has.
    assert watched("--true-on-policy", tmp_path / "run", global_batch_size=16) == 0
    assert [one[DIFFERS] for one in steps(tmp_path / "run")] == [0] * 3
    assert [(row["k3_kl"], row["train_rollout_logprob_abs_diff"]) for row in records(tmp_path / "run")] == [(0, 0)] * 3


def test_tokens_of_other_routes_are_dropped_and_a_compared_gradient_is_apart(tmp_path: Path) -> None:
    config = preset_path("route").read_text().partition("mis:")[2]
    route = "weight: null, reject: [{statistic: route, upper: 0.5}], routing: {experts: trainer}"
    assert "statistic: route, over: token, upper: 0.5" in config
    for name, flags in {"plain": "", "cosine": "--grad-cosine-every 1"}.items():
        assert watched(f"--rollout-weights int4 {flags}", tmp_path / name, route) == 0
    cosines = ("grad_cosine", "grad_cosine_uncorrected", "grad_cosine_on_policy")
    compared = [{key: row[key] for key in row if key not in cosines} for row in numbers(tmp_path / "cosine")]
    assert compared == numbers(tmp_path / "plain")
    assert steps(tmp_path / "cosine") == steps(tmp_path / "plain")
    assert all(0 < row["kept_fraction"] < 1 for row in compared)
    assert all(abs(row["grad_cosine"]) <= 1 for row in numbers(tmp_path / "cosine"))


def swap_layers(args: Namespace, groups: list[list[Any]]) -> None:
    """A sample filter: the routes of the first two layers change places."""
    for sample in (one for group in groups for one in group):
        sample.rollout_routed_experts = sample.rollout_routed_experts[:, [1, 0, 2]]


def repeat_an_expert(args: Namespace, groups: list[list[Any]]) -> None:
    """A sample filter: one row of the last layer names an expert twice."""
    groups[1][2].rollout_routed_experts[3, 2] = 5


def drop_a_row(args: Namespace, groups: list[list[Any]]) -> None:
    """A sample filter: the routes of a sample lack a token."""
    sample = groups[0][1]
    sample.rollout_routed_experts = sample.rollout_routed_experts[:-1]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (swap_layers, "layer 0 (pipeline stage 0), sample"),
        (repeat_an_expert, "layer 2 (pipeline stage 0), sample 2 of micro-batch 1: 1 of"),
        (drop_a_row, f"{ROUTES} of sample 1:"),
    ],
)
def test_a_planted_fault_stops_the_run(
    fault: Any, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert watched(f"--rollout-sample-filter-path {__name__}.{fault.__name__}", tmp_path / "run") != 0
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("cp", [1, 2])
def test_each_slot_takes_the_route_of_its_token(cp: int) -> None:
    tokens = [torch.arange(5), torch.arange(9)]
    routes = [torch.arange(len(one) - 1)[:, None, None] * 10 + torch.tensor([[[1, 2]]]) for one in tokens]
    for rank in range(cp):
        layout = pack(tokens, [2, 3], rank, cp)
        for row, sequence, position in zip(
            rows_of(layout, routes), layout.sequence.tolist(), layout.positions.tolist(), strict=True
        ):
            inside = position < len(tokens[sequence]) - 1
            assert row.tolist() == ([[10 * position + 1, 10 * position + 2]] if inside else [[0, 1]])
    with pytest.raises(InputError, match="sample 1: 7 rows for 9 tokens"):
        rows_of(layout, [routes[0], routes[1][1:]])
