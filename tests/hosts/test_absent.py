"""What stands in for a missing log-prob counts as NaN does, at every hook, in every dtype, wherever it stands."""

import math
from dataclasses import replace

import pytest
import torch
from batches import Batch, host_args, make_batch
from drive import assert_same_bytes, one_rank, run, same_bytes

from mis_plugins import mis
from mis_plugins.hosts.batch import without_absent_
from mis_plugins.shared.absent import LOWEST, is_absent

STAND_INS = [-9999.0, -1e4, -65504.0, -1e9, torch.finfo(torch.float32).min, -math.inf]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PLACES = {"first": [0], "middle": [2], "last": [4], "everywhere": [0, 1, 2, 3, 4]}
CONFIG = {
    "weight": {"level": "token", "upper": 2.0},
    "reject": [{"over": "mean", "lower": 0.5, "upper": 2.0}, {"statistic": "k3", "over": "max", "upper": 3.0}],
    "denominator": "kept",
}


def batch_of(dtype: torch.dtype = torch.float32) -> Batch:
    """Two turns around a tool's masked token; a certain token, whose log-prob is 0; a second sequence."""
    rows = [
        ([-0.5, 0.0, -1.5, -0.7, -2.0], [-0.75, 0.0, -1.0, -0.5, -2.5], [1, 1, 0, 1, 1]),
        ([-1.0, -0.25], [-0.5, -0.5], [1, 1]),
    ]
    return make_batch(rows).to(dtype)


def put(batch: Batch, side: str, places: list[int], value: float) -> Batch:
    rows = [x.clone() for x in getattr(batch, side)]
    rows[0][places] = torch.tensor(value, dtype=torch.float64).to(rows[0].dtype)
    return replace(batch, **{side: rows})


NO_LOG_PROBS = [None, "-0.5", b"-1", [-0.5, 7], math.nan, math.inf, -9999, LOWEST, *STAND_INS]


def test_what_is_a_log_prob():
    """The bound lies where a probability is zero."""
    assert [entry for entry in NO_LOG_PROBS if not is_absent(entry)] == []
    assert not any(map(is_absent, [0, 0.0, -0.0, -1, -104.0, -745.0, torch.tensor(-0.5)]))
    assert math.exp(LOWEST) == 0.0 < math.exp(LOWEST + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_rounds_a_stand_in_to_one(dtype: torch.dtype):
    given = torch.tensor([*STAND_INS, math.nan, -700.0, -0.5, 0.0], dtype=torch.float64).to(dtype)
    found = without_absent_(given.clone())
    assert found.dtype == dtype and found.isnan().tolist() == [True] * 7 + [False] * 3
    assert same_bytes(found[-3:], given[-3:])


def test_whole_numbers_are_log_probs_too():
    assert same_bytes(without_absent_(torch.tensor([-1, 0])), torch.tensor([-1.0, 0.0]))
    assert without_absent_(torch.tensor([-9999])).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("side", ["behavior", "proximal"])
def test_the_tis_hook_takes_a_stand_in_for_no_log_prob(side: str, place: str, dtype: torch.dtype):
    batch, places = batch_of(dtype), PLACES[place]
    expected = run(put(batch, side, places, math.nan), CONFIG)
    counted = {"behavior": "mis_nonfinite_rollout_mb", "proximal": "mis_nonfinite_train_mb"}[side]
    valid = len(set(places) - {2})
    for value in STAND_INS:
        found = run(put(batch, side, places, value), CONFIG)
        assert_same_bytes(found, expected)
        assert found.metrics[counted][0].tolist() == [valid] * 5
        assert all(row.isfinite().all() for rows in found.metrics.values() for row in rows)


def test_a_stand_in_on_both_sides_is_no_agreement():
    """With --use-rollout-logprobs a host hands over one list of log-probs as both sides, and every log ratio is 0."""
    batch = put(put(batch_of(), "behavior", [0], -9999.0), "proximal", [0], -9999.0)
    found = run(batch, {"weight": {"upper": 2.0}})
    assert found.weights[0][0] == 0 and found.weights[0][1] == 1
    assert found.metrics["mis_k3_kl"][0].max() < 1


@pytest.mark.parametrize("metrics", ["watch", "all"])
def test_the_metrics_of_a_step(metrics: str, logged: list[dict[str, float]], caplog: pytest.LogCaptureFixture):
    config = CONFIG | {"metrics": metrics}
    reports = {"custom_megatron_before_train_step_hook_path": "mis_plugins.mis.report_step"}
    args = host_args(mis=config, **reports)
    mis.report_step(args, 0, 0)
    for step, value in enumerate((math.nan, -9999.0), start=1):
        batch = put(batch_of(), "behavior", [0, 2, 3], value)
        mis.compute_mis_weights_with_cp(args, **batch.hook_kwargs(), parallel_state=one_rank())
        mis.report_step(args, 0, step)
    first, second = logged
    assert repr(first) == repr(second)
    assert second["nonfinite_rollout_tokens"] == 2 and second["nonfinite_train_tokens"] == 0
    assert "2 of 6 tokens have a log-prob that is NaN or infinite, or that stands in for none" in caplog.text
