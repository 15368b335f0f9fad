"""What rollout-data hooks leave is of one rollout and of one run: nothing older serves a later one without a word."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import host_args, ratio_batch
from pydantic import BaseModel, ConfigDict
from test_rollout_data_hook import rollout_data

from mis_plugins import mis
from mis_plugins.errors import InputError

BATCH = ratio_batch([[1.0, 3.0], [2.0, 5.0]], [[1, 1], [1, 0]])
CONFIG = {"weight": {"upper": 5.0, "normalize": {"scope": "rollout"}}}


def weights(args: SimpleNamespace) -> torch.Tensor:
    kwargs = BATCH.hook_kwargs()
    return mis.compute_mis_weights_with_cp(args, **kwargs)[0] / kwargs["pg_loss"]


def test_the_mean_is_that_of_the_last_rollout_and_of_any_arguments_object():
    mis.normalize_rollout(host_args(mis=CONFIG), 3, rollout_data(ratio_batch([[4.0]])))
    mis.normalize_rollout(host_args(mis=CONFIG), 3, rollout_data(BATCH))  # the host repeats the rollout
    torch.testing.assert_close(weights(host_args(mis=CONFIG))[:3], torch.tensor([0.5, 1.5, 1.0]))


@pytest.mark.parametrize(("trains", "refused"), [(3, False), (4, True), (2, False)])
def test_a_newer_rollout_refuses_the_older_mean(trains: int, refused: bool):
    """A lower number is a run that begins again."""
    mis.normalize_rollout(host_args(mis=CONFIG), 3, rollout_data(BATCH))
    if refused:
        with pytest.raises(InputError, match="rollout 4 trains, and the mean is that of rollout 3"):
            mis.report_step(host_args(mis=CONFIG), trains, 0)
    else:
        mis.report_step(host_args(mis=CONFIG), trains, 0)
        assert weights(host_args(mis=CONFIG))[0] == 0.5


def test_a_mean_of_another_config_is_refused():
    mis.normalize_rollout(host_args(mis=CONFIG), 3, rollout_data(BATCH))
    other = {"weight": {"upper": 2.0, "normalize": {"scope": "rollout"}}}
    with pytest.raises(InputError, match="the mean was computed under another config"):
        weights(host_args(mis=other))


def test_a_run_without_the_hook_reads_nothing_of_a_run_before():
    mis.normalize_rollout(host_args(mis=CONFIG), 3, rollout_data(BATCH))
    with pytest.raises(InputError, match="it was never computed"):
        weights(host_args(mis=CONFIG, rollout_data_postprocess_path=None))


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


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


def frozen(**settings: Any) -> Any:
    """Arguments of a typed host, made anew for each call."""
    return Extra(**vars(host_args(**settings)))


def test_every_hook_of_a_rollout_takes_frozen_arguments():
    settings = {"mis": CONFIG, "custom_tis_function_path": "a.b"}
    mis.normalize_rollout(frozen(**settings), 3, rollout_data(BATCH))
    mis.report_step(frozen(**settings), 3, 0)
    kwargs = BATCH.hook_kwargs()
    loss, _, _ = mis.compute_mis_weights_with_cp(frozen(**settings), **kwargs)
    torch.testing.assert_close((loss / kwargs["pg_loss"])[:3], torch.tensor([0.5, 1.5, 1.0]))
    mis.count_samples(frozen(**settings), 4, rollout_data(BATCH))
    mis.report_step(frozen(**settings), 4, 0)
    mis.report_last_step(frozen(mis=None, use_tis=False))
