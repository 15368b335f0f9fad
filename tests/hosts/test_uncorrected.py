"""A step whose arguments ask for a correction, and in which no hook of ours ran, stops every rank of the step."""

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from batches import host_args, ratio_batch
from launch import run_ranks, told

from mis_plugins import mis
from mis_plugins.errors import ConfigError
from mis_plugins.hosts import megatron

CONFIG = {"weight": {"upper": 2.0}}
OPSM = {"opsm": {"delta": 1e-4}}
TIS = "mis_plugins.mis.compute_mis_weights_with_cp"
ASKED = {
    "mis": CONFIG,
    "use_tis": False,
    "custom_tis_function_path": None,
    "loss_type": "policy_loss",
    "qkv_format": "thd",
}


def corrected_once(**settings: Any) -> None:
    mis.compute_mis_weights_with_cp(host_args(mis=CONFIG, **settings), **ratio_batch([[0.5]]).hook_kwargs())


def one_step(args: Any) -> None:
    mis.report_step(args, 0, 0)
    mis.report_step(args, 0, 1)


MISSING = [
    ({}, f"give --use-tis --custom-tis-function-path {TIS}$"),
    ({"use_tis": True}, f"give --custom-tis-function-path {TIS}$"),
    ({"custom_tis_function_path": TIS}, "give --use-tis$"),
    ({"custom_tis_function_path": TIS, "use_tis": True, "loss_type": "sft_loss"}, f"does not call .* {TIS} with"),
    ({"mis": OPSM}, "give --loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss$"),
    ({"loss_type": "custom_loss", "custom_loss_function_path": "a.b"}, "a.b corrects nothing; give --loss-type"),
]


@pytest.mark.parametrize("end", [lambda args: mis.report_step(args, 0, 1), mis.report_last_step])
@pytest.mark.parametrize(("settings", "said"), MISSING)
def test_the_missing_flag_is_named(settings: dict, said: str, end: Callable[[Any], None]):
    args = Namespace(**ASKED | settings)
    mis.report_step(args, 0, 0)
    with pytest.raises(ConfigError, match=f"^rollout 0, step 0: the arguments ask for a correction.*{said}"):
        end(args)
    corrected_once()
    mis.report_step(args, 1, 0)


SILENT = [
    {"loss_type": "value_loss"},
    {"trainer_role": "critic"},
    {"get_mismatch_metrics": True},
    {"mis": {"metrics": "full"}},
    {"mis": None},
    {"mis": None, "tis_upper_bound": 2.0, "use_tis": True, "custom_tis_function_path": "examples.mis.weights"},
]


@pytest.mark.parametrize("settings", SILENT)
def test_a_critic_a_run_that_watches_and_another_hook_ask_us_for_nothing(settings: dict):
    one_step(Namespace(**ASKED | settings))


@pytest.mark.parametrize(("use_tis", "asks"), [({"use_tis": False}, False), ({}, True)])
def test_a_file_may_say_that_a_run_watches(use_tis: dict, asks: bool, tmp_path: Path):
    (tmp_path / "mis.yaml").write_text(yaml.safe_dump({"mis": CONFIG, **use_tis}))
    args = Namespace(**ASKED, custom_config_path=str(tmp_path / "mis.yaml"))
    if asks:
        with pytest.raises(ConfigError, match="give --use-tis"):
            one_step(args)
    else:
        one_step(args)


def test_a_step_that_the_host_repeats_was_no_whole_one():
    args = Namespace(**ASKED)
    mis.report_step(args, 0, 0)
    mis.report_step(args, 0, 0)


@pytest.mark.parametrize("follows", [lambda args: mis.report_step(args, 1, 0), lambda args: mis.RECORDER.at_exit()])
def test_a_step_that_was_reported_is_not_judged_again(follows: Callable[[Any], None], caplog: pytest.LogCaptureFixture):
    args = Namespace(**ASKED)
    mis.report_step(args, 0, 0)
    corrected_once()
    mis.report_last_step(args)  # as slime calls it after each update of weights
    follows(args)
    assert not caplog.records


ROLLOUT = {"loss_masks": [torch.ones(2)]}
BEGINS = {
    "rollout 0, step 0": lambda args: mis.report_step(args, 0, 0),
    "rollout 0": lambda args: mis.count_samples(args, 0, ROLLOUT),
}


def told_at_exit(ended: str, args: Any, caplog: pytest.LogCaptureFixture, corrects: bool = False) -> list[str]:
    BEGINS[ended](args)
    if corrects:
        corrected_once()
    mis.RECORDER.at_exit()
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("ended", BEGINS)
@pytest.mark.parametrize(("settings", "said"), MISSING)
def test_a_run_of_one_step_is_judged_at_exit(ended: str, settings: dict, said: str, caplog: pytest.LogCaptureFixture):
    (message,) = told_at_exit(ended, Namespace(**ASKED | settings), caplog)
    assert re.search(f"^{ended}, this rank: the arguments ask for a correction.*{said}", message)


@pytest.mark.parametrize("ended", BEGINS)
@pytest.mark.parametrize(("settings", "corrects"), [*((one, False) for one in SILENT), ({}, True)])
def test_an_exit_says_nothing_of_what_is_corrected_or_asks_for_nothing(
    ended: str, settings: dict, corrects: bool, caplog: pytest.LogCaptureFixture
):
    assert not told_at_exit(ended, Namespace(**ASKED | settings), caplog, corrects)


def test_an_exit_that_finds_no_groups_remembers_the_stage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(megatron, "holds_log_probs", lambda: False)
        mis.report_step(Namespace(**ASKED), 0, 0)
    mis.RECORDER.at_exit()
    assert not caplog.records


def test_without_a_step_hook_the_next_rollout_tells():
    args, data = Namespace(**ASKED), ROLLOUT
    mis.count_samples(args, 0, data)
    mis.count_samples(args, 0, data)  # repeated
    corrected_once()
    mis.count_samples(args, 1, data)
    with pytest.raises(ConfigError, match="^rollout 1: the arguments ask for a correction.*give --use-tis"):
        mis.count_samples(args, 2, data)


NORMALIZED = [
    ({"weight": {"level": "sequence", "normalize": {}}}, "scope: micro_batch", " divides"),
    ({"weight": {"level": "geometric", "normalize": {"scope": "data_parallel"}}}, "scope: data_parallel", " divides"),
    *(({"weight": {"level": level, "normalize": {}}}, "scope: micro_batch", " and one turn")
      for level in ("segment", "segment_geometric")),
]  # fmt: skip


@pytest.mark.parametrize(("config", "said", "more"), NORMALIZED)
def test_a_sequence_that_is_divided_by_its_own_weight_is_told(
    config: dict, said: str, more: str, caplog: pytest.LogCaptureFixture
):
    for rows, told_of in (([[0.3, 4.0], [2.0]], False), ([[0.3, 4.0]], True)):
        mis.compute_mis_weights_with_cp(host_args(mis=config), **ratio_batch(rows).hook_kwargs())
        assert (f"{said} (tis_batch_normalize) in a micro-batch of one sequence{more}" in caplog.text) == told_of


def test_tokens_of_one_sequence_are_divided_by_their_mean(caplog: pytest.LogCaptureFixture):
    config = {"weight": {"level": "token", "normalize": {}}}
    mis.compute_mis_weights_with_cp(host_args(mis=config), **ratio_batch([[0.3, 4.0]]).hook_kwargs())
    assert not caplog.text


def on_a_grid(rank: int) -> list[str]:
    """Two pipeline stages of two data-parallel ranks; a hook runs on no rank, on one of the last stage, on both."""
    found = []
    for ran_on in ((), (2,), (2, 3)):
        mis.RECORDER.__init__()
        mis.report_step(Namespace(**ASKED), 0, 0)
        if rank in ran_on:
            mis.RECORDER.ran = True
        assert megatron.holds_log_probs() == (rank in (2, 3))
        found.append(told(lambda: mis.report_step(Namespace(**ASKED), 0, 1)))
    return found


def test_all_ranks_of_a_step_raise_together(tmp_path: Path):
    results = run_ranks(4, 1, on_a_grid, tmp_path, pipeline_model_parallel_size=2)
    for nowhere, on_one, on_both in results:
        assert "no hook of mis_plugins corrected: give --use-tis --custom-tis" in nowhere
        assert on_one == on_both == "no error"
