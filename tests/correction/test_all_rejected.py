"""A micro-batch of which nothing is left: skip, keep or raise, and never a NaN; and the kept denominator."""

import logging
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from batches import host_args, ratio_batch
from drive import call, corrected, one_rank, run, sum_of_sample_mean
from tolerances import EPS, weight_rtol

from mis_plugins import mis
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.adapters.miles import NEEDS as MILES
from mis_plugins.hosts.step_report import Recorder

BATCH = ratio_batch([[9.0, 0.1], [8.0]])
NOTHING = [{"over": "mean", "lower": 0.999, "upper": 1.0001}]


@pytest.mark.parametrize("metrics", ["full", "none"])
@pytest.mark.parametrize("reject", [NOTHING, [{"over": "token", "upper": 0.01}],
                                    [{"over": "sum", "unit": "segment", "lower": 1e4}]])  # fmt: skip
def test_the_flag(reject: list[dict], metrics: str):
    config = {"weight": {}, "reject": reject, "metrics": metrics}
    for batch in (BATCH, ratio_batch([[9.0, 0.1], [1.0]], [[1, 1], [0]])):
        assert bool(corrected(batch, config).all_rejected)
    on_policy = config | {"reject": [{"over": "mean", "lower": 0.9, "upper": 1.1}]}
    assert not bool(corrected(ratio_batch([[1.0], [9.0]]), on_policy).all_rejected)


def test_nothing_to_reject():
    assert corrected(BATCH, {"weight": {}}).all_rejected is None
    dead = ratio_batch([[9.0]], [[0]])
    assert not bool(corrected(dead, {"weight": None, "reject": NOTHING}).all_rejected)


def test_every_weight_zeroed_counts():
    assert bool(corrected(BATCH, {"weight": {"bound": "zero", "lower": 0.9, "upper": 1.1}}).all_rejected)
    assert bool(corrected(BATCH, {"weight": {"level": "sequence", "bound": "zero", "lower": 0.95, "upper": 1.05},
                                  "reject": [{"over": "max", "upper": 8.5}]}).all_rejected)  # fmt: skip


@pytest.mark.parametrize("action", ["skip", "raise"])
def test_skip_trains_on_nothing(action: str, monkeypatch: pytest.MonkeyPatch):
    """`raise` acts as `skip` until the next optimizer step."""
    monkeypatch.setattr(mis, "RECORDER", Recorder(step=(0, 0)))
    loss_in, loss, masks, metrics = call(BATCH, {"weight": {}, "reject": NOTHING, "on_all_rejected": action})
    (gradient,) = torch.autograd.grad(loss.sum(), loss_in)
    assert loss.abs().sum().item() == 0 and gradient.abs().sum().item() == 0
    assert not any(mask.any() for mask in masks)
    assert all(bool(torch.isfinite(value).all()) for value in metrics.values())


def test_keep_rejects_nothing():
    """The weights stay bounded, the masks are the host's, and so is everything that is said about them."""
    outcome = run(BATCH, {"weight": {}, "reject": NOTHING, "on_all_rejected": "keep"})
    plain = run(BATCH, {"weight": {}})
    assert all(map(torch.equal, outcome.weights, plain.weights))
    assert all(map(torch.equal, outcome.masks, BATCH.loss_masks))
    for name in ("mis_ess_mb", "mis_kept_fraction", "mis_kept_sequences_mb"):
        assert torch.equal(torch.cat(outcome.metrics[name]), torch.cat(plain.metrics[name])), name


@pytest.mark.parametrize("over", ["valid", "kept"])
def test_keep_gives_segments_back_to_the_mean(over: str):
    """The mean is over every turn again, not over none."""
    weight = {"level": "segment_geometric", "upper": 3.0, "normalize": {"over": over}}
    reject = [{"over": "mean", "unit": "segment", "upper": 0.01}]
    config = {"weight": weight, "reject": reject, "on_all_rejected": "keep"}
    plain = {"weight": weight | {"normalize": {"over": "valid"}}}
    found, plain = corrected(BATCH, config), corrected(BATCH, plain)
    assert torch.equal(found.weights, plain.weights) and bool(found.keep.all())


def test_keep_does_nothing_while_something_is_kept():
    batch = ratio_batch([[9.0, 0.1], [1.0]])
    config = {"weight": {}, "reject": NOTHING}
    assert run(batch, config).masks[0].tolist() == [0, 0]
    assert run(batch, config | {"on_all_rejected": "keep"}).masks[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"weight": {"bound": "mask"}, "reject": NOTHING}, r" mis\.weight\.bound: mask"),
        ({"weight": {"bound": "zero"}, "reject": NOTHING}, r" mis\.weight\.bound: zero"),
        ({"weight": {"level": "sequence"}, "reject": [{"over": "token", "upper": 0.01}], "aggregate": "kept"},
         r"mis\.aggregate: kept"),
    ],
)  # fmt: skip
def test_keep_cannot_give_back_what_is_gone(config: dict, key: str):
    """A weight that was never bounded, or what a sequence would add up."""
    with pytest.raises(ConfigError, match=rf"mis\.on_all_rejected: keep .*{key}"):
        from_mapping(config | {"on_all_rejected": "keep"})


# -------------------------------------------------------------------------------------------------- denominator


def test_the_kept_denominator_is_a_mean_over_what_is_kept():
    """Per-sample mean of the host, n = 4, 2 and 1: the loss of the kept tokens divided by 3, 2 and 1."""
    batch = ratio_batch([[1.0, 1.5, 9.0, 0.8], [1.2, 1.0], [1.1]])
    config = {"weight": {"upper": 10.0}, "reject": [{"over": "token", "upper": 5.0}], "denominator": "kept"}
    outcome = run(batch, config)
    host = sum(w.sum().item() / len(w) for w in outcome.weights)
    assert host == pytest.approx((1.0 + 1.5 + 0.8) / 3 + (1.2 + 1.0) / 2 + 1.1, rel=weight_rtol(3.0) + 6 * EPS)
    assert outcome.loss.dtype == torch.float32


@pytest.mark.parametrize("hook", ["compute_mis_weights_fsdp", "compute_mis_weights_with_cp"])
@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_fsdp_divides_by_what_the_masks_keep(hook: str, denominator: str):
    """Its batches hold no rollout_mask_sums: the host divides by the masks that it gets back."""
    batch = ratio_batch([[1.0, 9.0, 1.5, 0.8], [9.0, 8.0], [1.2, 1.0], [1.1]], [[1, 1, 1, 0], [1, 1], [1, 1], [1]])
    config = {"weight": {"upper": 2.0}, "reject": [{"over": "token", "upper": 5.0}], "denominator": denominator}
    given = batch.hook_kwargs() | {"pg_loss": torch.ones(9)}

    def host_loss(**settings: object) -> float:
        """As Miles's get_sum_of_sample_mean without denominators."""
        args = host_args(train_backend="fsdp", **settings)
        loss, masks, _ = getattr(mis, hook)(args, **given, parallel_state=one_rank())
        return float(sum_of_sample_mean(loss, masks))

    kept = {"original": [2.5 / 3, 0, 2.2 / 2, 1.1], "kept": [2.5 / 2, 0, 2.2 / 2, 1.1]}
    assert host_loss(mis=config) == pytest.approx(sum(kept[denominator]), rel=weight_rtol(3.0) + 6 * EPS)
    flat = dict(tis_level="token", tis_mode="truncate", tis_upper_bound=2.0, use_rs=True, rs_lower_bound=0.1,
                rs_upper_bound=5.0)  # fmt: skip
    assert host_loss(**flat) == pytest.approx(sum(kept["kept"]), rel=weight_rtol(3.0) + 6 * EPS)


def test_a_batch_that_says_what_to_divide_by_is_left_to_it():
    """Half of the tokens are rejected; Miles's own loss holds the batch while it calls the hook, each its own."""
    given: dict[str, Any] = ratio_batch([[1.0, 9.0]], [[1, 1]]).hook_kwargs() | {"pg_loss": torch.ones(2)}
    args = host_args(mis={"weight": None, "reject": [{"over": "token", "upper": 5.0}]})
    module: dict[str, Any] = {"__name__": MILES.tis_call.addresses[0].module}
    exec("def policy_loss_function(hook, batch):\n    return hook()\n", module)
    hook = partial(mis.compute_mis_weights_fsdp, args=args, **given)
    for sums, factor in ((None, 0.5), (torch.tensor([2.0]), 1.0), (None, 0.5)):
        loss, _, _ = module["policy_loss_function"](hook, {"rollout_mask_sums": sums})
        assert loss.tolist() == [factor, 0.0]


@pytest.mark.parametrize(
    "settings",
    [{"calculate_per_token_loss": True}, {"custom_pg_loss_reducer_function_path": "theirs.mean_over_something"}],
)
def test_fsdp_loss_that_no_mask_divides_is_left_as_it_is(settings: dict):
    given: dict[str, Any] = ratio_batch([[1.0, 9.0]], [[1, 1]]).hook_kwargs() | {"pg_loss": torch.ones(2)}
    config = {"weight": None, "reject": [{"over": "token", "upper": 5.0}]}
    loss, _, _ = mis.compute_mis_weights_fsdp(host_args(mis=config, **settings), **given)
    assert loss.tolist() == [1.0, 0.0]


def test_a_host_that_may_divide_by_what_is_kept_is_named(caplog: pytest.LogCaptureFixture):
    config = {"weight": {}, "reject": [{"over": "token", "upper": 5.0}]}
    with caplog.at_level(logging.WARNING, logger="mis_plugins"):
        call(BATCH, config, custom_convert_samples_to_train_data_path="theirs.convert")
    assert "rollout_mask_sums" in caplog.text


KEPT = {"weight": {}, "reject": NOTHING, "denominator": "kept"}
ORIGINAL = KEPT | {"denominator": "original"}
WITH_CP, ON_FSDP = mis.compute_mis_weights_with_cp, mis.compute_mis_weights_fsdp


@pytest.mark.parametrize(
    ("hook", "config", "settings", "said"),
    [
        (WITH_CP, KEPT, {"use_kl_loss": True}, "kept is that .* terms of --use-kl-loss, .* by the tokens before"),
        (WITH_CP, KEPT, {"entropy_coef": 0.01}, "terms of --entropy-coef 0.01, which .* tokens before rejection"),
        (WITH_CP, KEPT, {"use_kl_loss": True, "entropy_coef": 0.01}, "--use-kl-loss and --entropy-coef 0.01"),
        (WITH_CP, KEPT, {"use_kl_loss": False, "entropy_coef": 0.0}, None),
        (WITH_CP, ORIGINAL, {"use_kl_loss": True}, None),
        (ON_FSDP, KEPT, {"use_kl_loss": True}, None),
        (ON_FSDP, ORIGINAL, {"use_kl_loss": True}, "original is that .* divides by the kept tokens; use .*: kept"),
        (ON_FSDP, {"weight": {}}, {"use_kl_loss": True}, None),
    ],
)
def test_terms_that_the_tis_hook_is_not_handed_are_warned_of(
    hook: Any, config: dict, settings: dict, said: str | None, caplog: pytest.LogCaptureFixture
):
    """A host divides KL and entropy by its own denominator, and a warning says where the policy term has another."""
    given = ratio_batch([[1.0, 9.0]]).hook_kwargs()
    with caplog.at_level(logging.WARNING, logger="mis_plugins"):
        for _ in range(2):
            hook(host_args(mis=config, **settings), **given)
    told = [text for text in caplog.messages if "of the policy term alone" in text]
    assert len(told) == (said is not None) and all(re.search(str(said), text) for text in told), told


@pytest.mark.parametrize(("settings", "message"), [
    ({"calculate_per_token_loss": True}, r"mis\.denominator: kept .*--calculate-per-token-loss"),
    ({"custom_pg_loss_reducer_function_path": "mis_plugins.mis.kept_token_mean"}, "both divide by the kept"),
    ({"custom_pg_loss_reducer_function_path": "theirs.reduce"}, r"theirs\.reduce"),
    ({"custom_convert_samples_to_train_data_path": "theirs.convert"}, "rollout_mask_sums"),
])  # fmt: skip
def test_where_it_cannot_be_had(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        call(BATCH, KEPT, **settings)


@pytest.mark.parametrize(("config", "key"), [
    ({"weight": None, "opsm": {"delta": 0.1}}, r"mis\.opsm"),
    ({"weight": {}, "objective": {}}, r"mis\.objective"),
])  # fmt: skip
def test_what_only_the_loss_hook_can_serve(config: dict, key: str):
    with pytest.raises(ConfigError, match=rf"{key}: .*--custom-loss-function-path mis_plugins\.mis\.policy_loss"):
        mis.compute_mis_weights(host_args(mis=config), **BATCH.lists())


def test_probability_veto():
    """The Miles blog's veto: one token below 1e-6 under a policy drops its sequence, whatever the ratio."""
    batch = ratio_batch([[1.0, 1.0], [1.0]])
    batch.proximal[0][1] = batch.behavior[0][1] = math.log(3e-7)
    for statistic in ("proximal_prob", "behavior_prob"):
        outcome = run(batch, {"weight": None, "reject": [{"statistic": statistic, "over": "min", "lower": 1e-6}]})
        assert [mask.tolist() for mask in outcome.masks] == [[0, 0], [1]]
        assert outcome.metrics["mis_rs_catastrophic_seq_fraction"][0].tolist() == [1.0, 1.0]


def test_of_what_is_given_back_a_token_without_a_weight_counts_in_the_kept_denominator():
    batch = ratio_batch([[9.0, 9.0]])
    batch.behavior[0][1] = math.nan
    config = {"weight": None, "reject": [{"over": "token", "upper": 2.0}], "denominator": "kept"}
    assert run(batch, config | {"on_all_rejected": "keep"}).weights[0].tolist() == [1, 0]


def test_the_mean_of_a_rollout_is_not_made_up():
    normalized = {"weight": {"normalize": {"scope": "rollout"}}}
    with pytest.raises(InputError, match="was never computed: pass --rollout-data-postprocess-path"):
        corrected(BATCH, normalized)
