"""What a host's log says of a hook's metrics in a step with fully masked samples, which the host divides by as well."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from batches import host_args, make_batch
from drive import one_rank
from test_partials import corrected
from test_recorder import ARGS

from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.hosts.averages import average
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.metrics.token_metrics import OF_MIS_PY, diagnose

Rows = list[tuple[list[float], list[float], list[int]]]
LIVE: Rows = [([-1.0, -2.0], [-1.5, -2.0], [1, 1]), ([-0.5, -0.7, -3.0], [-0.9, -0.2, -1.0], [1, 0, 1])]
MASKED: Rows = [([-1.0], [-1.0], [0]), ([-1.0, -1.0, -1.0], [-2.0, -3.0, -4.0], [0, 0, 0])]
CONFIG = {"weight": {"upper": 1.3}, "reject": [{"over": "token", "lower": 0.3}], "metrics": "full"}
PER_TOKEN = {"calculate_per_token_loss": True}


def logged(micro_batches: Sequence[Rows], **settings: object) -> dict[str, float]:
    """Each metric as Miles and slime log it: of each sample the mean, or each token, over all of the step."""
    args = host_args(**{"mis": CONFIG, "rollout_function_path": None} | settings)
    total, divisor = dict[str, float](), 0.0
    for rows in micro_batches:
        batch = make_batch(rows)
        given = batch.hook_kwargs() | {"parallel_state": one_rank(), "max_seq_lens": None}
        metrics = mis.compute_mis_weights_with_cp(args, **given)[2]
        valid = [mask.sum().clamp(min=1) for mask in batch.loss_masks]
        per_token = bool(settings.get("calculate_per_token_loss"))
        divisor += float(sum(valid)) if per_token else len(rows)
        for name, value in metrics.items():
            parts = zip(value.split(batch.response_lengths), batch.loss_masks, valid, strict=True)
            means = [(x * mask).sum() / (1 if per_token else n) for x, mask, n in parts]
            total[name] = total.get(name, 0.0) + float(sum(means))
    return {name: value / divisor for name, value in total.items()}


def of(metrics: dict[str, float], theirs: bool) -> dict[str, float]:
    """Metrics that Miles's `mis.py` names too, or the metrics that it lacks."""
    return {name: x for name, x in metrics.items() if (name.removeprefix("mis_") in OF_MIS_PY) == theirs}


@pytest.mark.parametrize("settings", [{}, PER_TOKEN])
@pytest.mark.parametrize("masked", [MASKED[:1], MASKED, MASKED * 3])
def test_our_names_do_not_notice_masked_samples(masked: Rows, settings: dict):
    alone, among = logged([LIVE], **settings), logged([LIVE[:1] + masked + LIVE[1:]], **settings)
    assert of(among, theirs=False) == pytest.approx(of(alone, theirs=False), rel=1e-5)
    assert "mis_kept_fraction" in among and "mis_ratio_max_mb" in among and "mis_saturated_fraction" in among


def test_names_of_mis_py_mean_what_they_mean_there():
    """A batch with two of four samples fully masked logs half of the mean over the other two."""
    alone, among = logged([LIVE]), logged([LIVE + MASKED])
    assert of(among, theirs=True) == pytest.approx(
        {name: x / 2 for name, x in of(alone, True).items()}, rel=1e-5
    )


def test_over_micro_batches_it_is_their_mean_by_samples():
    """In each by its own masked samples; what a whole masked micro-batch takes away, no hook can know."""
    first, second = logged([LIVE[:1]]), logged([LIVE[1:]])
    found, diluted = logged([LIVE[:1] + MASKED, LIVE[1:]]), logged([LIVE[:1], MASKED[:1]])
    for name in of(found, theirs=False):
        assert found[name] == pytest.approx((3 * first[name] + second[name]) / 4, rel=1e-5)
        assert diluted[name] == pytest.approx(first[name] / 2, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, PER_TOKEN])
def test_a_wholly_masked_micro_batch_is_finite(settings: dict):
    assert set(logged([MASKED], **settings).values()) == {0.0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "sequences"),
        ({"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"}, "sequences"),
        ({"rollout_function_path": "mine.rollout"}, None),
        ({"custom_generate_function_path": "mine.generate"}, None),
        ({"custom_convert_samples_to_train_data_path": "mine.convert"}, None),
        ({"custom_generate_function_path": "mine.generate"} | PER_TOKEN, "tokens"),
    ],
)
def test_what_a_host_divides_by(settings: dict, expected: str | None):
    """Several samples of a rollout share one place in the average, and no hook is told how many."""
    assert average(SimpleNamespace(**settings)) == expected


def test_where_rollouts_may_be_several_samples_nothing_is_scaled():
    settings = {"custom_generate_function_path": "mine.generate"}
    alone, among = logged([LIVE], **settings), logged([LIVE + MASKED], **settings)
    assert among == pytest.approx({name: x / 2 for name, x in alone.items()}, rel=1e-5)


def test_lists_without_a_host_are_left_alone():
    batch, given = make_batch(LIVE + MASKED), ("train_log_probs", "rollout_log_probs", "loss_masks")
    kwargs = {name: value for name, value in batch.hook_kwargs().items() if name in given}
    metrics = mis.compute_mis_weights(host_args(mis=CONFIG), **kwargs)[2]
    plain = diagnose(corrected(batch, from_mapping(CONFIG)), prefix="")
    for name, value in metrics.items():
        assert [float(x) for part in value for x in part] == plain[name].tolist()


# ------------------------------------------------------------------------------------------------------- the warning


def step(rows: Rows, config: dict) -> Recorder:
    recorder = Recorder()
    recorder.report(ARGS, 1, 0)
    recorder.record(corrected(make_batch(rows), from_mapping(config)))
    recorder.flush(ARGS)
    return recorder


def test_masked_samples_are_told_with_what_they_do(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "mis_plugins"):
        recorder = step(LIVE + MASKED, CONFIG)
        recorder.record(corrected(make_batch(LIVE + MASKED), from_mapping(CONFIG)))
        recorder.flush(ARGS)
    said = [x.getMessage() for x in caplog.records if "have no token in the loss" in x.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("rollout 1, step 0: 2 of 4 sequences have no token in the loss")
    assert "mis.metrics: all" in said[0]


@pytest.mark.parametrize(("rows", "metrics"), [(LIVE, "full"), (LIVE + MASKED, "all")])
def test_nothing_to_tell(caplog: pytest.LogCaptureFixture, rows: Rows, metrics: str):
    step(rows, CONFIG | {"metrics": metrics})
    assert "no token in the loss" not in caplog.text
