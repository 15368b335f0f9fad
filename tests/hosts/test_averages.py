"""What a host's log says of a hook's metrics in a step with fully masked samples, which the host divides by as well."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from batches import host_args, make_batch
from drive import one_rank, sum_of_sample_mean
from launch import run_ranks
from test_partials import corrected
from test_recorder import ARGS

from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import InputError
from mis_plugins.hosts.rollout_hooks import Counted, count
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.hosts.tracking import average
from mis_plugins.metrics.token_metrics import OF_MIS_PY, diagnose
from mis_plugins.packing.ragged import Ranks

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
            total[name] = total.get(name, 0.0) + float(sum_of_sample_mean(value, batch.loss_masks, per_token))
    return {name: value / divisor for name, value in total.items()}


def of(metrics: dict[str, float], theirs: bool) -> dict[str, float]:
    """Metrics that Miles's `mis.py` names too, or the metrics that it lacks."""
    return {name: x for name, x in metrics.items() if (name.removeprefix("mis_") in OF_MIS_PY) == theirs}


def test_names_of_mis_py_mean_what_they_mean_there():
    """A batch with two of four samples fully masked logs half of the mean over the other two."""
    alone, among = logged([LIVE]), logged([LIVE + MASKED])
    assert of(among, theirs=True) == pytest.approx({name: x / 2 for name, x in of(alone, True).items()}, rel=1e-5)


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


@pytest.mark.parametrize("settings", [{}, PER_TOKEN])
def test_a_step_of_masked_samples_alone_logs_zeros(settings: dict):
    assert set(logged([MASKED], **settings).values()) == {0}


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


# ------------------------------------------------------------------------------------ counted by the rollout-data hook


def counted(steps: Sequence[Sequence[Rows]], step: tuple[int, int] | None, **settings: object) -> list[dict]:
    """What the host logs of each step, when `count_samples` saw the rollout first, as slime hands it.

    step: whether the step hook says which step trains, and of which rollout.
    """
    args = host_args(**settings)
    mis.count_samples(args, 7, handed(steps))
    found = []
    for number, micro_batches in enumerate(steps):
        with patch.object(mis.RECORDER, "step", step and (step[0], number)):
            found.append(logged(micro_batches, **vars(args)))
    return found


def handed(steps: Sequence[Sequence[Rows]]) -> dict[str, Any]:
    """slime's rollout batch of these steps; its samples lie in another order than its micro-batches take them."""
    micro_batches = [rows for step in steps for rows in step]
    samples = [row for rows in micro_batches for row in rows]
    place = list(reversed(range(len(samples))))
    masks = [torch.tensor(samples[i][2]) for i in place]
    numbers = iter(place)
    return {
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor([float(mask.sum()) for mask in masks]),
        "micro_batch_indices": [[next(numbers) for _ in rows] for rows in micro_batches],
        "num_microbatches": [len(step) for step in steps],
        "global_batch_sizes": [sum(map(len, step)) for step in steps],
    }


def without_masked(split: Sequence[Rows]) -> list[Rows]:
    """Micro-batches without their fully masked samples, and without those that hold no other."""
    return [left for rows in split if (left := [row for row in rows if any(row[2])])]


UNEVEN = [LIVE[:1] + MASKED, LIVE[1:]]
DEAD_LAST = [LIVE[:1], LIVE[1:], MASKED]


@pytest.mark.parametrize("settings", [{}, PER_TOKEN, {"custom_generate_function_path": "mine.generate"}])
@pytest.mark.parametrize("split", [[LIVE + MASKED], UNEVEN, [MASKED[:1], LIVE, MASKED[1:]], DEAD_LAST])
def test_counted_samples_dilute_none_of_our_names(split: list[Rows], settings: dict):
    """However masked samples are spread; names of `mis.py` keep the meaning that they have there."""
    alone = logged(without_masked(split), **settings)
    (found,), plain = counted([split], None, **settings), logged(split, **settings)
    assert of(found, theirs=False) == pytest.approx(of(alone, theirs=False), rel=1e-5)
    assert of(found, theirs=True) == of(plain, theirs=True)


def test_each_step_of_a_rollout_has_its_own_share():
    steps = [UNEVEN, [LIVE], DEAD_LAST]
    for found, step in zip(counted(steps, (7, 0)), steps, strict=True):
        assert of(found, theirs=False) == pytest.approx(of(logged(without_masked(step)), theirs=False), rel=1e-5)


def test_a_step_beyond_what_the_arguments_promise_has_no_share():
    counted_steps = Counted(7, torch.tensor([0.5, 0.25]))
    assert counted_steps.share((7, 1)) == 0.25 and counted_steps.share((7, 2)) is None


@pytest.mark.parametrize("step", [None, (6, 0)])
def test_a_step_that_nothing_names_is_scaled_within_its_micro_batches(step: tuple[int, int] | None):
    """No step hook, or the count of another rollout."""
    steps = [UNEVEN, DEAD_LAST]
    assert counted(steps, step) == [logged(step) for step in steps]


def test_a_rollout_of_several_samples_counts_once():
    """Three samples of two rollouts, one of them masked: two of two rollouts train."""
    data = {
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([0, 0]), torch.tensor([1, 0])],
        "rollout_mask_sums": torch.tensor([2.0, 2.0, 1.0]),
        "micro_batch_indices": [[0], [1, 2]], "num_microbatches": [2], "global_batch_sizes": [2],
    }  # fmt: skip
    args = host_args()
    mis.count_samples(args, 0, data)
    assert average(args) == 1


def test_hosts_without_a_schedule_train_equal_parts_in_order():
    """The embedded host and whoever is not known."""
    masks = [torch.tensor(mask) for mask in ([0], [1], [1], [1, 1])]
    args = host_args(global_batch_size=2, rollout_batch_size=4, n_samples_per_prompt=1)
    mis.count_samples(args, 3, {"loss_masks": masks})
    assert [average(args, (3, step)) for step in (0, 1)] == [0.5, 1]


def count_on_rank(rank: int) -> list[float]:
    """Rank 0 holds both samples that train of step 0; of step 1 each rank has one, and one that is masked."""
    rows = [[LIVE, LIVE[:1] + MASKED[:1]], [MASKED, LIVE[1:] + MASKED[1:]]][rank]
    data = handed([[part] for part in rows]) | {"global_batch_sizes": [4, 4]}
    group = torch.distributed.group.WORLD
    return count(host_args(), 0, data, Ranks(None, group, None)).shares.tolist()


def test_ranks_count_together(tmp_path: Path):
    assert run_ranks(2, 1, count_on_rank, tmp_path, megatron=False) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("given", "said"), [((), "args alone, and not from Miles's train_actor"), (([],), r"\(args, samples\)")]
)
def test_a_host_that_hands_no_rollout_is_told(given: tuple, said: str):
    with pytest.raises(
        InputError, match=f"count_samples needs the rollout batch.*{said}.*the step hook logs exact means"
    ):
        mis.count_samples(host_args(), *given)


# ------------------------------------------------------------------------------------------------------- the warning


NO_TOKEN = "2 of 4 sequences have no token in the loss"
WATCHED, EXACT = (
    "mis.metrics: watch logs means over the rest",
    "numbers under train/mis_step/ are means over the rest",
)


@pytest.mark.parametrize(
    ("rows", "config", "has_hook", "said"),
    [
        (LIVE + MASKED, CONFIG, True, WATCHED),
        (LIVE + MASKED, CONFIG | {"metrics": "all"}, True, EXACT),
        *((LIVE + MASKED, {"metrics": size}, hook, WATCHED) for size in ("core", "full") for hook in (True, False)),
        (LIVE + MASKED, CONFIG | {"metrics": "none"}, True, None),
        (LIVE, CONFIG, True, None),
        (LIVE, CONFIG | {"metrics": "all"}, True, None),
    ],
)  # fmt: skip
def test_masked_samples_are_told_once_with_what_they_do(
    rows: Rows, config: dict, has_hook: bool, said: str | None, caplog: pytest.LogCaptureFixture
):
    """A run that only watches is told of a fully masked sample; without the step hook a rank tells one step late."""
    recorder = Recorder()
    for number in range(2):
        if has_hook:
            recorder.report(ARGS, 1, number)
        recorder.record(corrected(make_batch(rows), from_mapping(config)))
    if has_hook:
        recorder.flush(ARGS)
    found = [x.getMessage() for x in caplog.records if "have no token in the loss" in x.getMessage()]
    where = "rollout 1, step 0" if has_hook else "this rank"
    assert len(found) == bool(said)
    assert said is None or (found[0].startswith(f"{where}: {NO_TOKEN}") and said in found[0])
