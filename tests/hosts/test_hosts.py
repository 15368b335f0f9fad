"""The functions as the hosts load and call them, and what the hosts then do with the answer."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from batches import LEVELS, MASK_TYPES, Batch, batches, broken_batches, configs, host_args, make_batch, ratio_batch
from drive import assert_all_same, assert_same_bytes, call, one_rank, run, same_bytes, sum_of_sample_mean
from hypothesis import given
from test_rollout_data_hook import rollout_data
from tolerances import EPS, normalized_rtol

from mis_plugins import mis
from mis_plugins.errors import InputError
from mis_plugins.hosts.step_report import Recorder

CONFIG = {
    "weight": {"level": "sequence", "bound": "clip", "upper": 1.5, "normalize": {}},
    "reject": [{"over": "token", "lower": 0.4, "upper": 3.5}, {"over": "min", "lower": 1e-4}],
}
HOOKS = ["compute_mis_weights_with_cp", "compute_mis_weights_fsdp"]


@pytest.mark.parametrize(
    ("name", "more", "lacks"),
    [
        (HOOKS[0], {"parallel_state": one_rank(), "max_seq_lens": None}, ()),
        (HOOKS[0], {"parallel_state": one_rank(), "max_seq_lens": [16, 16, 16], "qkv_format": "bshd"}, ()),
        (HOOKS[0], {}, ("qkv_format",)),
        (HOOKS[1], {}, ()),
        (HOOKS[1], {"cp_rank": 0, "cp_size": 1, "cp_group": None}, ()),
    ],
    ids=["Miles", "Miles, padded rows", "slime, an older release", "FSDP", "FSDP, other keywords"],
)
def test_a_hosts_call(name: str, more: dict[str, Any], lacks: Sequence[str]):
    """Each host's keywords; one process without Megatron's groups where none are handed over."""
    batch, more = ratio_batch([[0.5, 3.0], [1.2], [0.9, 1.1, 4.0]]), dict(more)
    args = host_args(mis=CONFIG, **{key: more.pop(key) for key in ("qkv_format",) if key in more})
    for argument in lacks:
        delattr(args, argument)
    answer = getattr(mis, name)(args=args, **batch.hook_kwargs(), **more)
    check_answer(batch, answer, by_kept=name == HOOKS[1])


ROLLOUT_MEAN = {"weight": {"normalize": {"scope": "rollout"}}}


def called(name: str, batch: Batch, **settings: object) -> object:
    """The answer of a hook that compares the trainer's log-probs with the engine's."""
    hook, args = getattr(mis, name), host_args(**{"mis": ROLLOUT_MEAN} | settings)
    if name == "normalize_rollout":
        return hook(args, 0, rollout_data(batch))
    return hook(args, **(batch.lists() if name == "compute_mis_weights" else batch.hook_kwargs()))


SHARED = [
    lambda rows: rows,
    tuple,
    lambda rows: [row.detach() for row in rows],
    lambda rows: [rows[0].clone(), rows[1], rows[2].clone()],
]


@pytest.mark.parametrize("name", [*HOOKS, "compute_mis_weights", "normalize_rollout"])
@pytest.mark.parametrize("share", SHARED)
def test_the_engines_log_probs_in_place_of_the_trainers_are_refused(name: str, share: Callable):
    batch = ratio_batch([[], [0.5, 3.0], [1.2]])
    batch = replace(batch, proximal=share(batch.behavior))
    settings = {} if name == "normalize_rollout" else {"mis": CONFIG}
    with pytest.raises(InputError, match=r"log_probs\[1\] and rollout_log_probs\[1\]: one tensor"):
        called(name, batch, **settings)
    called(name, replace(batch, proximal=[row.clone() for row in batch.behavior]), **settings)


@pytest.mark.parametrize("name", [*HOOKS, "compute_mis_weights"])
def test_a_run_that_watches_takes_one_tensor_for_both(name: str):
    batch = ratio_batch([[0.5, 3.0], [1.2]])
    called(name, replace(batch, proximal=batch.behavior), mis={"weight": {}}, use_tis=False)


def test_a_sequence_without_a_valid_token_has_no_gradient_on_fsdp():
    """0 of 0 tokens are kept, and 0 times NaN is NaN."""
    kwargs = ratio_batch([[0.5, 3.0], [1.2]], [[1, 1], [0]]).hook_kwargs()
    args = host_args(mis={"weight": None, "reject": [{"over": "token", "upper": 2.0}]})
    loss, _, _ = mis.compute_mis_weights_fsdp(args=args, **kwargs)
    (gradient,) = torch.autograd.grad(loss.sum(), kwargs["pg_loss"])
    assert gradient.tolist() == [0.5, 0, 0]


def check_answer(batch: Batch, answer: tuple, by_kept: bool = False) -> None:
    """Right by the oracle, and of the shapes that the hosts' reducer splits and multiplies.

    by_kept: the host divides by what the masks keep, and the loss makes up for that.
    """
    loss, masks, metrics = answer
    expected = oracle.correct(batch.samples, CONFIG)
    assert [m.bool().tolist() for m in masks] == expected.keep
    applied = [
        w * keep * (sum(kept) / len(kept) if by_kept else 1)  # all of them are valid
        for row, kept in zip(expected.weights, expected.keep, strict=True)
        for w, keep in zip(row, kept, strict=True)
    ]
    torch.testing.assert_close(loss, batch.pg_loss() * torch.tensor(applied), rtol=normalized_rtol(4.0), atol=0)
    for value in [loss, *metrics.values()]:
        assert value.shape == (sum(batch.response_lengths),)
    assert torch.isfinite(sum_of_sample_mean(loss, masks))


@pytest.mark.parametrize("dtype", MASK_TYPES)
def test_masks_come_back_as_the_host_keeps_them(dtype: torch.dtype):
    """Same dtype, one tensor a sequence, full responses; the host's own are not written to."""
    batch = ratio_batch([[0.5, 9.0], [1.2]])
    batch = replace(batch, loss_masks=[m.to(dtype) for m in batch.loss_masks])
    masks = run(batch, {"weight": None, "reject": [{"over": "token", "upper": 2.0}]}).masks
    assert [m.dtype for m in masks] == [dtype, dtype]
    assert [m.tolist() for m in masks] == [[1, 0], [1]]
    assert [m.tolist() for m in batch.loss_masks] == [[1, 1], [1]]


# ------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_half_precision_is_cast_before_the_subtraction(dtype: torch.dtype, level: str):
    """-9.0 and -8.9375 in half precision: their exact difference, not one of 8 or 11 bits; exp(20) is finite."""
    batch = make_batch([([-9.0, -0.001], [-8.9375, -20.0], [1, 1]), ([-9.0], [-8.9375], [1])])
    half = batch.to(dtype)
    config = {"weight": {"level": level, "bound": "mask", "upper": 1e8, "lower": 1e-8}}
    outcome = run(half, config)
    assert_same_bytes(outcome, run(half.to(torch.float32), config))
    assert outcome.weights[1].item() == pytest.approx(math.exp(-0.0625), rel=4 * EPS)


# --------------------------------------------------------------------------------------------------------- metrics

FLAT = {
    "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0,
    "rs_lower_bound": None, "rs_upper_bound": None, "rs_veto_threshold": 1e-4,
}  # fmt: skip


@given(batches() | broken_batches(), batches() | broken_batches(), configs())
def test_the_key_set_is_the_configs(first: Batch, second: Batch, config: dict):
    """The host takes the names from the first micro-batch and sums over all: order and set must not vary."""
    assert list(run(first, config).metrics) == list(run(second, config).metrics)


@pytest.mark.parametrize("config", [CONFIG, {"weight": {"upper": 2.0}}, {"weight": None, "reject": CONFIG["reject"]}])
def test_metrics_full_watch_core_none(config: dict):
    """Fewer metrics, the same correction; watch and core are parts of full, of five metrics and of at most 8."""
    batch = ratio_batch([[0.5, 3.0], [1.2], [0.3, 8.0]])
    sizes = ("full", "watch", "core", "none")
    full, watch, core, none = (run(batch, config | {"metrics": size}) for size in sizes)
    assert 1 <= len(core.metrics) <= 8 and not none.metrics
    assert watch.metrics.keys() == FIVE
    for part in (watch, core):
        assert part.metrics.keys() < full.metrics.keys()
        for name, rows in part.metrics.items():
            assert_all_same(rows, full.metrics[name], name)
    for other in (watch, core, none):
        assert same_bytes(other.loss, full.loss)
        assert_all_same(other.masks, full.masks, "masks")


FIVE = {"mis_k3_kl", "mis_ppl_ratio", "mis_kept_fraction", "mis_ess_mb", "mis_saturated_fraction"}


@pytest.mark.parametrize(
    ("settings", "handed"),
    [({"mis": {"weight": {}}}, "five"), ({"mis": {"weight": {}, "metrics": "watch"}}, "five"),
     (FLAT, "full"), (FLAT | {"use_rs": False}, "full"), (FLAT | {"mis": {"metrics": "watch"}}, "five"),
     ({"mis": {"weight": {}}, "on_fsdp": True}, "full")],
)  # fmt: skip
def test_five_metrics_where_the_step_hook_logs_the_others(settings: dict, handed: str):
    """All of them for Miles's flat keys, on a host without a step hook, and in a notebook."""
    batch, hook = ratio_batch([[0.5, 3.0], [1.2]]), mis.compute_mis_weights_with_cp
    if settings.pop("on_fsdp", False):
        hook = mis.compute_mis_weights_fsdp
    args = SimpleNamespace(use_tis=True, get_mismatch_metrics=False, qkv_format="thd", **settings)
    given: dict[str, Any] = batch.hook_kwargs() | {"parallel_state": one_rank()}
    names = set(hook(args, **given)[2])
    assert names == FIVE if handed == "five" else names > FIVE
    notebook = {name: given[name] for name in ("train_log_probs", "rollout_log_probs", "loss_masks")}
    told = {f"mis_{name}" for name in mis.compute_mis_weights(args, **notebook)[2]}
    assert told > FIVE


def test_watch_without_the_step_hook_says_once_what_is_missing(said_once: Callable[[], list[str]]):
    for _ in range(2):
        call(ratio_batch([[0.5, 3.0]]), {"weight": {}, "metrics": "watch"})
    (said,) = said_once()
    assert said.startswith("mis.metrics: watch needs --custom-megatron-before-train-step-hook-path")


# ---------------------------------------------------------------------------------------------------- metrics only


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What was logged as a warning, where the step hook was called."""
    monkeypatch.setattr(mis, "RECORDER", Recorder(step=(0, 0)))
    caplog.set_level(logging.WARNING, logger="mis_plugins")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("mis_plugins")]


ONLY_METRICS = {"use_tis": False, "get_mismatch_metrics": True}


SILENT: list[dict[str, Any]] = [{}, {"mis": {"metrics": "core"}}, {"use_rs": False}]
SAID: list[tuple[dict[str, Any], str]] = [
    (FLAT, "tis_upper_bound, use_rs, rs_veto_threshold"),
    ({"use_rs": True}, "use_rs"),
    ({"tis_mode": "mask", "tis_batch_normalize": True, **FLAT, "use_rs": False}, "tis_upper_bound, rs_veto_threshold"),
    ({"tis_upper_bound": 2.0, "use_rs": False, "rs_veto_threshold": None}, "tis_upper_bound"),
    ({"mis": {"weight": {"bound": "mask", "upper": 1.1}}}, "mis.weight"),
    ({"mis": {"segment_wise": {"enabled": False, "weight_cap": 3}}}, "mis.segment_wise"),
    ({"mis": CONFIG}, "mis.weight, mis.reject"),
]
NOTHING_ACTS = "--use-tis is not set: metrics only, nothing is weighed or rejected, whatever {} say"
NO_METRICS = "mis.metrics: none without --use-tis: nothing is weighed"
ONLY = [
    *((settings, None) for settings in SILENT),
    *((settings, NOTHING_ACTS.format(keys)) for settings, keys in SAID),
    ({"mis": {"metrics": "none"}}, NO_METRICS),
]


@pytest.mark.parametrize(("settings", "said"), ONLY)
def test_metrics_only_changes_nothing_and_says_once_what_does_not_act(
    settings: dict, said: str | None, warnings: Callable[[], list[str]]
):
    """`--get-mismatch-metrics` without `--use-tis`: the same loss, the same masks, the mismatch metrics."""
    batch = ratio_batch([[0.5, 3.0], [1.2, 1e-9]], [[1, 1], [1, 0]])
    batch.behavior[1][0] = math.nan
    size = settings.get("mis", {}).get("metrics")
    for _ in range(2):
        loss_in, loss, masks, metrics = call(batch, None, **ONLY_METRICS, **settings)
        assert same_bytes(loss, loss_in)
        for mask, given_mask in zip(masks, batch.loss_masks, strict=True):
            assert torch.equal(mask.float(), given_mask.float())
        assert (len(metrics) == 0) == (size == "none") and (size != "core" or len(metrics) <= 8)
    assert [text.startswith(said or "-") for text in warnings()] == [True] * (said is not None)


@pytest.mark.parametrize("name", ["kl", "training_log_ppl", "ess_mb"])
def test_metrics_have_no_other_names_than_the_prefixed_ones(name: str):
    """One of a token, of a sequence, of a micro-batch: a name that the mapping does not list is none of it."""
    metrics = call(ratio_batch([[0.5, 3.0], [1.2]]), CONFIG)[3]
    assert f"mis_{name}" in metrics and name not in metrics
    with pytest.raises(KeyError, match=f"^'{name}'$"):
        metrics[name]


@pytest.mark.parametrize("level", LEVELS)
def test_lists_of_weights_are_zero_outside_the_mask(level: str):
    batch = ratio_batch([[0.5, 3.0, 1.0], [1.2]], [[1, 0, 1], [0]])
    args = host_args(mis={"weight": {"level": level, "bound": "clip", "upper": 2.0}})
    weights, _, _ = mis.compute_mis_weights(args, **batch.lists())
    assert weights is not None and [(w != 0).tolist() for w in weights] == [[True, False, True], [False]]


def test_no_warning_in_a_plain_run(warnings: Callable[[], list[str]]):
    run(ratio_batch([[0.5, 3.0], [1.2]]), CONFIG)
    assert warnings() == []


# --------------------------------------------------------------------------------------------------------- gradient


@given(batches(), configs())
def test_gradient_flows_through_the_loss_alone(batch: Batch, config: dict):
    """Log-probs that require a gradient (the recompute was skipped) get none through the weights."""
    kwargs = batch.hook_kwargs()
    leaves = [x.clone().requires_grad_() for x in batch.proximal]
    kwargs["train_log_probs"] = leaves
    function = mis.compute_mis_weights_fsdp
    loss, masks, metrics = function(host_args(mis=config), **kwargs)
    found = torch.autograd.grad(loss.sum(), [kwargs["pg_loss"], *leaves], allow_unused=True)
    assert found[0] is not None and all(g is None for g in found[1:])
    assert not any(x.requires_grad for x in [*masks, *metrics.values()])
