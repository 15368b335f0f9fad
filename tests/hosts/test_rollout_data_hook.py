"""`--rollout-data-postprocess-path`: how hosts call it, and what it leaves for the steps that follow.

Miles and slime call it differently, and slime documents a third way. What it leaves is of one rollout and of one run:
nothing older serves a later one without a word.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import Batch, host_args, ratio_batch
from tolerances import normalized_rtol

from lab.host.cli.loading import load_function
from mis_plugins import mis
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import rollout_store

hook = load_function("mis_plugins.mis.normalize_rollout", "--rollout-data-postprocess-path")
ROLLOUT = {"weight": {"upper": 5.0, "normalize": {"scope": "rollout"}}}
MICRO_BATCH = {"weight": {"upper": 5.0, "normalize": {"scope": "micro_batch"}}}


def rollout_data(batch: Batch) -> dict[str, Any]:
    """The part of slime's `rollout_data` that is there when the hook is called, after log-probs and advantages."""
    return {
        "log_probs": batch.proximal, "rollout_log_probs": batch.behavior, "loss_masks": batch.loss_masks,
        "total_lengths": batch.total_lengths, "response_lengths": batch.response_lengths,
        "rollout_mask_sums": torch.tensor([float(mask.sum()) for mask in batch.loss_masks]),
        "advantages": [torch.ones(n) for n in batch.response_lengths],
    }  # fmt: skip


MILES = """
def train_actor(hook, args, rollout_id, rollout_data):
    hook(args)
"""


def miles(args: SimpleNamespace, data: dict[str, Any] | None = None) -> None:
    """A stand-in of `miles/backends/megatron_utils/actor.py`, whose trainer holds the batch and hands `args` alone."""
    trainer: dict[str, Any] = {"__name__": "miles.backends.megatron_utils.actor"}
    exec(MILES, trainer)
    trainer["train_actor"](hook, args, 3, example() if data is None else data)


def both(args: SimpleNamespace) -> None:
    """A function of the user's that calls both rollout-data hooks."""
    hook(args, 3, example())
    mis.count_samples(args, 3, example())


def another(args: SimpleNamespace) -> None:
    """A host that hands `args` alone from a function that is not known."""
    hook(args)


def example() -> dict[str, Any]:
    """A rollout whose ratios have the mean 2 over the valid tokens."""
    return rollout_data(ratio_batch([[1.0, 3.0], [2.0, 5.0]], [[1, 1], [1, 0]]))


def slime(args: SimpleNamespace) -> None:
    """`slime/backends/megatron_utils/actor.py`."""
    hook(args, 3, example())


def slime_as_documented(args: SimpleNamespace) -> None:
    """`slime/docs/en/get_started/customization.md`, section 8."""
    hook(args, [[SimpleNamespace(rollout_log_probs=[-1.0], response_length=1)]])


def slime_with_one_step(args: SimpleNamespace) -> None:
    """slime then leaves the trainer's log-probs out (`can_reuse_log_probs_in_loss` in its `actor.py`)."""
    hook(args, 3, rollout_data(ratio_batch([[1.0, 3.0]])) | {"log_probs": None})


@pytest.mark.parametrize("call", [slime, miles, both])
def test_the_mean_of_the_rollout_is_left_for_the_hook(call: Any):
    args = host_args(mis=ROLLOUT)
    call(args)
    held = rollout_store.ROLLOUT.held
    assert held is not None and held.rollout_id == 3 and held.counted is not None
    torch.testing.assert_close(held.mean, torch.tensor(2.0).double(), rtol=normalized_rtol(5.0), atol=0)
    assert args == host_args(mis=ROLLOUT), "nothing is written on the host's arguments"


@pytest.mark.parametrize(
    ("call", "said"),
    [(another, "args alone, and not from Miles's train_actor, where the batch could be read; use scope: data_parallel"),
     (slime_as_documented, r"\(args, samples\), and samples hold no trainer log-probs; use scope: data_parallel"),
     (slime_with_one_step,
      "with one step give --get-mismatch-metrics beside --use-tis, or use the loss hook .--loss-type custom_loss "
      "--custom-loss-function-path mis_plugins.mis.policy_loss.; or use scope: data_parallel")],
)  # fmt: skip
def test_what_others_hand_is_not_enough(call: Any, said: str):
    args = host_args(mis=ROLLOUT)
    with pytest.raises(InputError, match=said):
        call(args)
    assert rollout_store.ROLLOUT.held is None


@pytest.mark.parametrize("call", [miles, another, slime, slime_as_documented])
@pytest.mark.parametrize("settings", [{"mis": MICRO_BATCH}, {"mis": ROLLOUT, "use_tis": False}])
def test_a_hook_without_effect_is_refused(call: Any, settings: dict):
    """Under every host alike, before it looks at what it was handed."""
    with pytest.raises(ConfigError, match="has no effect without --use-tis and mis.weight.normalize.scope: rollout"):
        call(host_args(**settings))


# ---------------------------------------------------------------------------------------------------- what it leaves

BATCH = ratio_batch([[1.0, 3.0], [2.0, 5.0]], [[1, 1], [1, 0]])


def weights(args: SimpleNamespace) -> torch.Tensor:
    kwargs = BATCH.hook_kwargs()
    return mis.compute_mis_weights_with_cp(args, **kwargs)[0] / kwargs["pg_loss"]


def test_the_mean_is_that_of_the_last_rollout_and_of_any_arguments_object():
    mis.normalize_rollout(host_args(mis=ROLLOUT), 3, rollout_data(ratio_batch([[4.0]])))
    mis.normalize_rollout(host_args(mis=ROLLOUT), 3, rollout_data(BATCH))  # the host repeats the rollout
    torch.testing.assert_close(weights(host_args(mis=ROLLOUT))[:3], torch.tensor([0.5, 1.5, 1.0]))


@pytest.mark.parametrize(("trains", "refused"), [(3, False), (4, True), (2, False)])
def test_a_newer_rollout_refuses_the_older_mean(trains: int, refused: bool):
    """A lower number is a run that begins again."""
    mis.normalize_rollout(host_args(mis=ROLLOUT), 3, rollout_data(BATCH))
    if refused:
        with pytest.raises(InputError, match="rollout 4 trains, and the mean is that of rollout 3"):
            mis.report_step(host_args(mis=ROLLOUT), trains, 0)
    else:
        mis.report_step(host_args(mis=ROLLOUT), trains, 0)
        assert weights(host_args(mis=ROLLOUT))[0] == 0.5


OTHER = {"weight": {"upper": 2.0, "normalize": {"scope": "rollout"}}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mis": OTHER}, "the mean was computed under another config"),
        ({"mis": ROLLOUT, "rollout_data_postprocess_path": None}, "it was never computed"),
    ],
)
def test_a_mean_of_another_config_or_of_a_run_before_is_refused(settings: dict[str, Any], said: str):
    mis.normalize_rollout(host_args(mis=ROLLOUT), 3, rollout_data(BATCH))
    with pytest.raises(InputError, match=said):
        weights(host_args(**settings))


def test_older_counts_are_not_used_and_this_is_said(said_once: Callable[[], list[str]]):
    half = rollout_data(ratio_batch([[1.0], [1.0]], [[1], [0]]))
    args = host_args(mis={"weight": {}})
    mis.count_samples(args, 3, half)
    assert mis.ROLLOUT.counted(args) is not None and not said_once()
    mis.report_step(args, 4, 0)
    assert mis.ROLLOUT.counted(args) is None
    assert "rollout 4 trains, and samples were counted for rollout 3 alone" in said_once()[0]


def test_counts_of_another_run_of_this_process_are_not_used():
    mis.count_samples(host_args(mis={"weight": {}}), 3, rollout_data(BATCH))
    assert mis.ROLLOUT.counted(host_args(mis={"weight": {}})) is not None
    assert mis.ROLLOUT.counted(host_args(mis={"weight": {"upper": 3.0}})) is None
