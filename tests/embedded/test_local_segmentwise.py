"""Segment-wise weights in the embedded host: what becomes of versions on their way to the loss, and of a whole run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_local_loop import ALONE, LOSS_HOOK, configured, numbers, run

from lab.host.cli.arguments import parse_args
from lab.host.rollout.sample import Sample, Status
from lab.host.rollout.sampler import Rollout, shard
from lab.host.train.parallel import ParallelState
from lab.host.train.trainer import RolloutData
from mis_plugins.config.loading import preset_path
from mis_plugins.errors import InputError

CURRENT = 5


def sample(index: int, versions: Sequence[int] | None, stored: Sequence[float | None] | None = None) -> Sample:
    return Sample(
        index=index,
        group_index=0,
        tokens=[7, *range(3)],
        response_length=3,
        reward=1.0,
        rollout_log_probs=[-1.0, -2.0, -3.0],
        weight_versions=["5"],
        status=Status.COMPLETED,
        output_versions=None if versions is None else list(versions),
        recomputed_log_probs=None if stored is None else list(stored),
    )


def sharded(
    mis: dict, *samples: Sample, version: int | None = CURRENT, flags: str = LOSS_HOOK, state: ParallelState = ALONE
) -> RolloutData:
    args = parse_args(
        f"--rollout-batch-size 1 --n-samples-per-prompt {len(samples)} --advantage-estimator reinforce {flags}".split()
    )
    args.mis = mis
    return shard(args, state, Rollout(list(samples), torch.ones(len(samples)), version))


def test_versions_reach_the_trainer_with_what_was_stored():
    data = sharded({"segment_wise": {}}, sample(0, [3, 4, 5], [-1.5, None, None]), sample(1, [5, 5, 5]))
    assert data["proximal_version"] == CURRENT
    assert [x.tolist() for x in data["output_versions"]] == [[3, 4, 5], [5, 5, 5]]
    assert data["recomputed_log_probs"][0][0] == -1.5
    assert data["recomputed_log_probs"][0][1:].isnan().all() and data["recomputed_log_probs"][1].isnan().all()
    assert [x.tolist() for x in data["loss_masks"]] == [[1, 1, 1], [1, 1, 1]]


STALE = sample(41, [2, 4, 5]), sample(42, [4, 4, 5])


@pytest.mark.parametrize("mis", [{"segment_wise": {}}, {"weight": {"upper": 3}}], ids=["said", "by default"])
def test_a_token_too_old_names_its_sample(mis: dict):
    message = r"sample 41, token 0: version 2, with the trainer at 5: what its next version gives it was not stored"
    with pytest.raises(InputError, match=message):
        sharded(mis, *STALE)


@pytest.mark.parametrize(
    ("mis", "masks"),
    [
        ({"segment_wise": {"too_old": "drop"}}, [[0, 1, 1], [1, 1, 1]]),
        ({"segment_wise": {"method": "loglinear"}}, [[1, 1, 1], [1, 1, 1]]),
        ({"segment_wise": {"enabled": False}}, [[1, 1, 1], [1, 1, 1]]),
        ({"weight": None, "metrics": "all"}, [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_what_else_becomes_of_a_token_too_old(mis: dict, masks: list[list[int]]):
    data = sharded(mis, *STALE)
    assert [x.tolist() for x in data["loss_masks"]] == masks
    assert all(mask.dtype == torch.int for mask in data["loss_masks"])


def test_a_loss_that_reads_no_versions_refuses_none():
    assert [x.sum() for x in sharded({"weight": {"upper": 3}}, *STALE, flags="")["loss_masks"]] == [3, 3]


@pytest.mark.parametrize(("versions", "version"), [([5, 5, 5], None), (None, CURRENT)])
def test_what_nobody_knows_is_not_handed_on(versions: list[int] | None, version: int | None):
    data = sharded({}, sample(0, versions), sample(1, versions), version=version)
    assert not {"output_versions", "recomputed_log_probs", "proximal_version"} & data.keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sample_without_versions_beside_others(rank: int):
    """Every rank refuses the rollout, whichever of them got the sample."""
    state = dataclasses.replace(ALONE, effective_dp=dataclasses.replace(ALONE.effective_dp, rank=rank, size=2))
    message = r"sample 41: no output_versions, which other samples of the rollout have.*\(1 such samples\)"
    with pytest.raises(InputError, match=message):
        sharded({"segment_wise": {}}, sample(40, [5, 5, 5]), sample(41, None), state=state)


def test_a_synchronous_run_is_that_of_standard_weights(tmp_path: Path):
    """Every token is of the trainer's own version: the same losses, gradients and rewards to the last digit."""
    off = configured(tmp_path / "off.yaml", "{segment_wise: {enabled: false, weight_cap: 5.0}}")
    grid = "--context-parallel-size 2 --warmup-steps 20 --num-digits 2"
    for name, config in (("on", f"--custom-config-path {preset_path('segment-wise')}"), ("off", off)):
        assert run(f"{grid} {LOSS_HOOK} {config}", tmp_path / name) == 0
    on, standard = numbers(tmp_path / "on"), numbers(tmp_path / "off")
    assert [row.keys() for row in on] == [row.keys() for row in standard]
    for name in ("loss", "grad_norm", "reward_rollout", "mis_ess_mb", "mis_k3_kl"):
        assert [row[name] for row in on] == [row[name] for row in standard]
    assert any(row["grad_norm"] for row in on)
