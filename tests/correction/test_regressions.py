"""What the hosts' own mis.py gets wrong, right here. Each docstring says what it did; CHANGELOG.md lists them."""

import math

import pytest
import torch
from batches import MILES_YAML, make_batch, ratio_batch
from drive import assert_close, run
from tolerances import EPS


def flat(**change: object) -> dict:
    return MILES_YAML | {"use_tis": True} | change


def test_b7_a_veto_needs_no_use_rs():
    """mis.py: silently off without `use_rs`."""
    batch = ratio_batch([[0.5, 1e-5], [1.2]])
    outcome = run(batch, **flat(use_rs=False))
    assert [m.tolist() for m in outcome.masks] == [[0, 0], [1]]


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
