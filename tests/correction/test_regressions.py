"""What the hosts' own mis.py gets wrong, right here. Each docstring says what it did; CHANGELOG.md lists them."""

import math

import pytest
import torch
from batches import MILES_YAML, host_args, make_batch, ratio_batch
from drive import assert_all_same, assert_close, call, run, same_bytes, sum_of_sample_mean
from tolerances import EPS

NO_REJECTION = {"use_rs": False, "rs_veto_threshold": None}


def flat(**change: object) -> dict:
    return MILES_YAML | {"use_tis": True} | change


def test_b2_metrics_only_without_a_yaml():
    """mis.py: AttributeError, the Namespace has no tis_lower_bound."""
    batch = ratio_batch([[0.5, 3.0], [1.2]])
    loss_in, loss, masks, metrics = call(batch, use_tis=False, get_mismatch_metrics=True)
    assert same_bytes(loss, loss_in) and "mis_k3_kl" in metrics
    assert_all_same(masks, batch.loss_masks, "masks")


@pytest.mark.parametrize("log_prob", [-11.0, -18.0, -31.0])
def test_b3_the_gradient_norm_does_not_shrink_with_one_bad_token(log_prob: float):
    """mis.py: gradient norm 0.383 -> 0.147 / 2.2e-4 / 4.0e-7 as the one rejected token gets rarer."""

    def norm(last: float) -> float:
        batch = make_batch([([-1.0] * 512, [-1.0] * 511 + [last], [1] * 512)])
        return float(run(batch, **flat(tis_mode="mask", **NO_REJECTION)).weights[0].norm())

    assert norm(log_prob) == norm(-5.0)


def test_b5_a_host_that_guards_its_loss_stays_guarded():
    """Miles zeroes what stands under the mask; multiplied by mis.py's NaN weight its loss is NaN again."""
    batch = ratio_batch([[0.5, 3.0]], [[1, 0]])
    batch.proximal[0][1] = math.nan
    _, loss, masks, _ = call(batch, **flat(**NO_REJECTION))
    assert torch.isfinite(sum_of_sample_mean(loss, masks))


def test_b7_a_veto_needs_no_use_rs():
    """mis.py: silently off without `use_rs`."""
    batch = ratio_batch([[0.5, 1e-5], [1.2]])
    outcome = run(batch, **flat(use_rs=False))
    assert [m.tolist() for m in outcome.masks] == [[0, 0], [1]]


def test_a_preset_is_not_turned_on_by_use_tis_in_args():
    """`use_tis` stays the host's flag: our own keys never set it, and without it a config changes nothing."""
    args = host_args(use_tis=False, mis={"weight": {"upper": 1.1}})
    batch = ratio_batch([[3.0]])
    loss_in, loss, _, _ = call(batch, **vars(args))
    assert same_bytes(loss_in, loss)


@pytest.mark.parametrize("log_ratio", [50.0, 89.0, 120.0])
def test_k3_is_clamped_as_weights_are(log_ratio: float):
    """mis.py: 4e19 at a log ratio of 50, inf at 89."""
    batch = make_batch([([0.0], [-log_ratio], [1])])
    found = run(batch, {"weight": {}}).metrics["mis_k3_kl"][0].item()
    assert_close(found, math.exp(20.0) - 21.0, 32 * EPS, 0.0, "k3")


@pytest.mark.parametrize("value", [-100.0, -700.0, -1e4, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("side", ["proximal", "behavior"])
@pytest.mark.parametrize("level", ["token", "segment", "sequence", "geometric"])
def test_no_log_prob_is_too_small_for_a_metric(value: float, side: str, level: str):
    """Engines clamp -inf to the last, and no token is sampled at the last three, which are no log-probs.

    mis.py: a perplexity of inf, and NaN in the average behind a masked token.
    """
    batch = ratio_batch([[0.5, 3.0, 0.7], [1.2, 1.1]], [[1, 0, 1], [1, 1]])
    getattr(batch, side)[0][2] = value
    for reject in ([], [{"statistic": "k2", "over": "mean", "upper": 0.1}], [{"over": "sum", "lower": 0.5}]):
        outcome = run(batch, {"weight": {"level": level, "bound": "clip"}, "reject": reject})
        for rows in [outcome.weights, *outcome.metrics.values()]:
            assert all(bool(torch.isfinite(row).all()) for row in rows)
        is_log_prob = value > -1000
        assert outcome.metrics["mis_saturated_fraction"][0].tolist() == [0.0, 0.0, float(is_log_prob)]
        counted = {"proximal": "mis_nonfinite_train_mb", "behavior": "mis_nonfinite_rollout_mb"}[side]
        assert outcome.metrics[counted][0].tolist() == [float(not is_log_prob)] * 3


def test_a_live_non_finite_rollout_log_prob_never_weighs_one():
    """mis.py: NaN weight, and 0 * NaN keeps the loss NaN even where rejection masks the token."""
    for value in (math.nan, math.inf, -math.inf):
        batch = ratio_batch([[0.5, 3.0, 1.0], [1.2]])
        batch.behavior[0][2] = value
        _, loss, masks, metrics = call(batch, **flat())
        assert torch.isfinite(sum_of_sample_mean(loss, masks))
        assert loss[2].item() == 0.0
        assert metrics["mis_nonfinite_rollout_mb"].tolist() == [1.0] * 4


def test_a_sequence_with_an_unknown_weight_has_the_smallest_one_zero():
    batch = ratio_batch([[0.5, 3.0, 1.0], [1.2]])
    batch.behavior[0][2] = math.nan
    found = run(batch, {"weight": {"upper": 2.0}}).metrics
    assert [float(row[0]) for row in found["mis_is_ratio_min_final"]] == [0.0, pytest.approx(1.2, rel=4 * EPS)]
    assert [float(row[0]) for row in found["mis_is_ratio_max_final"]] == [2.0, pytest.approx(1.2, rel=4 * EPS)]


@pytest.mark.parametrize("level", ["sequence", "geometric", "segment"])
def test_an_unknown_ratio_is_beyond_no_bound(level: str):
    """Of what is known of the first sequence, 9, neither its product nor its mean is made."""
    batch = ratio_batch([[9.0, 9.0], [9.0]])
    batch.behavior[0][1] = math.nan
    found = run(batch, {"weight": {"level": level, "upper": 2.0}}).metrics
    assert torch.cat(list(found["mis_tis_truncate_fraction"])).tolist() == [0.0, 0.0, 1.0]


def test_a_live_non_finite_trainer_log_prob_is_counted():
    """Its gradient is already in the host's loss: counted under a name of its own, and weight 0."""
    batch = ratio_batch([[0.5, 3.0, 1.0], [1.2]])
    batch.proximal[0][2] = math.nan
    _, _, _, metrics = call(batch, **flat())
    assert metrics["mis_nonfinite_train_mb"].tolist() == [1.0] * 4
    assert metrics["mis_nonfinite_rollout_mb"].tolist() == [0.0] * 4


def test_true_extremes_of_the_weight():
    """mis.py's is_ratio_max_final reads 6e7 with an upper bound of 2 in mask mode; weight_max_mb is the applied one."""
    batch = ratio_batch([[1.0, math.exp(18.0)], [0.8]])
    outcome = run(batch, **flat(tis_mode="mask", tis_batch_normalize=False, **NO_REJECTION))
    assert outcome.metrics["mis_weight_max_mb"][0][0].item() <= 2.0
    assert outcome.metrics["mis_is_ratio_max_final"][0][0].item() == pytest.approx(math.exp(18.0), rel=32 * EPS)


def test_one_of_two_sequences_vetoed_reads_a_half():
    """mis.py's fraction, averaged by token, reads 0.010 for a short vetoed sequence beside a long one."""
    batch = ratio_batch([[1e-6], [1.0] * 99])
    outcome = run(batch, **flat())
    assert outcome.metrics["mis_kept_sequences_mb"][0][0].item() == 0.5


@pytest.mark.parametrize(
    ("bounds", "outside"), [({"lower": 1.0, "upper": 3.0}, "low"), ({"lower": 0.4, "upper": 1.0}, "high")]
)
def test_what_lies_on_a_bound_is_within_it(bounds: dict, outside: str):
    """A ratio on a bound passes the weight's bound, and a rule with one limit or two."""
    batch = ratio_batch([[1.0, 0.5 if outside == "low" else 2.0]])  # a log ratio of exactly 0
    alone = {side: bound for side, bound in bounds.items() if bound == 1.0}
    for rule in (bounds, alone):
        assert run(batch, {"weight": None, "reject": [{"over": "token", **rule}]}).masks[0].tolist() == [1, 0]
        outcome = run(batch, {"weight": {"bound": "mask", **bounds}, "reject": [{"over": "token", **rule}]})
        assert outcome.masks[0].tolist() == [1, 0]
        for metric in (f"mis_tis_mask_fraction_{outside}", f"mis_rs_mask_fraction_{outside}"):
            assert outcome.metrics[metric][0].tolist() == [0.0, 1.0]


def test_a_log_ratio_at_the_clamp_is_not_saturated():
    batch = make_batch([([-1.0, -1.0, -22.0], [-21.0, -21.5, -1.5], [1, 1, 1])])
    assert run(batch, {"weight": {}}).metrics["mis_saturated_fraction"][0].tolist() == [0.0, 1.0, 1.0]


def test_a_log_prob_beyond_float32_is_counted_as_what_it_becomes():
    batch = ratio_batch([[0.5, 3.0]])
    batch.behavior[0] = torch.tensor([-1.0, -1e300], dtype=torch.float64)
    outcome = run(batch, {"weight": {}})
    assert outcome.weights[0].tolist() == [pytest.approx(0.5), 0.0]
    assert outcome.metrics["mis_nonfinite_rollout_mb"][0].tolist() == [1.0, 1.0]
