"""Identities that hold by algebra, and what must not change the answer."""

import math
from dataclasses import replace

import pytest
import torch
from batches import Batch, batches, configs, garbage, host_args, make_batch, poisoned, ratio_batch
from drive import assert_all_same, assert_same_bytes, run, same_bytes
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import host_scale
from tolerances import EPS, normalized_rtol

from mis_plugins import mis

# ------------------------------------------------------------------------------------------------------ identities


@given(batches(), configs(metrics="full"))
def test_equal_policies_change_nothing(batch: Batch, config: dict):
    """Equal policies: every ratio is 1, whatever the level, bound, rules on the mismatch or normalization."""
    assume(all(keeps_no_mismatch(rule) for rule in config["reject"]))
    batch = replace(batch, proximal=[row.clone() for row in batch.behavior])
    outcome = run(batch, config)
    for weights, mask, kept in zip(outcome.weights, batch.loss_masks, outcome.masks, strict=True):
        assert torch.equal(weights[mask.bool()], torch.ones(int(mask.bool().sum())))
        assert torch.equal(kept.bool(), mask.bool())
    for name in ("mis_kl", "mis_k3_kl", "mis_log_ppl_diff", "mis_chi2_token", "mis_chi2_seq"):
        assert all(
            bool((x[m.bool()] == 0).all()) for x, m in zip(outcome.metrics[name], batch.loss_masks, strict=True)
        ), name
    scale, valid = host_scale("ess_mb", batch.samples), batch.flat_mask
    ess = torch.cat(outcome.metrics["mis_ess_mb"])[valid]
    torch.testing.assert_close(ess, torch.full_like(ess, scale), rtol=EPS, atol=0)


def keeps_no_mismatch(rule: dict) -> bool:
    """A rule that equal policies pass: a probability is no mismatch, and bounds may exclude a divergence of 0."""
    statistic = rule.get("statistic", "ratio")
    if statistic == "ratio":
        return True
    return not statistic.endswith("_prob") and rule.get("lower", -1) <= 0 <= rule.get("upper", 1)


@pytest.mark.parametrize(("log_ratio", "weight"), [(-18.0, 1.0), (-19.0, math.exp(-19.0))])
def test_a_vanishing_mean_divides_nothing(log_ratio: float, weight: float):
    """Above 1e-8 the mean divides; below (e^-19 = 5.6e-9) it would only blow up rounding, and the weights stay."""
    batch = make_batch([([log_ratio] * 2, [0.0] * 2, [1, 1]), ([log_ratio], [0.0], [1])])
    for level in ("token", "geometric"):
        weights = run(batch, {"weight": {"level": level, "normalize": {}}}).weights
        torch.testing.assert_close(torch.cat(weights), torch.full((3,), weight), rtol=normalized_rtol(20.0), atol=0)


# ------------------------------------------------------------------------------------------------------ invariances


@given(batches(), configs(), garbage | st.just(3.0), garbage | st.just(-7.0))
def test_what_stands_under_the_mask_changes_not_one_bit(batch: Batch, config: dict, proximal: float, behavior: float):
    clean = run(poisoned(batch, -1.0, -1.0), config)
    assert_same_bytes(clean, run(poisoned(batch, proximal, behavior), config))


@given(batches(), configs())
def test_inputs_are_left_alone(batch: Batch, config: dict):
    before = [x.clone() for x in batch.proximal + batch.behavior + batch.loss_masks]
    run(batch, config)
    assert_all_same(before, batch.proximal + batch.behavior + batch.loss_masks, "inputs")


def test_the_three_functions_agree():
    """Megatron, FSDP and plain lists: one core."""
    batch = ratio_batch([[0.5, 3.0], [1.2], [0.9, 1.1, 4.0]])
    config = {"weight": {"level": "sequence", "upper": 1.5, "normalize": {}}, "reject": [{"over": "sum", "upper": 5.0}]}
    args, megatron = host_args(mis=config), run(batch, config)
    loss, masks, metrics = mis.compute_mis_weights_fsdp(args, pg_loss=batch.pg_loss(), **batch.lists())
    assert same_bytes(loss, megatron.loss)
    assert_all_same(masks, megatron.masks, "fsdp masks")
    weights, plain_masks, plain_metrics = mis.compute_mis_weights(args, **batch.lists())
    assert weights is not None
    assert_all_same([w * m for w, m in zip(weights, plain_masks, strict=True)], megatron.weights, "weights")
    assert_all_same(plain_masks, megatron.masks, "masks")
    assert {f"mis_{name}" for name in plain_metrics} == set(metrics) == set(megatron.metrics)
    for name, value in metrics.items():
        assert same_bytes(value, torch.cat(megatron.metrics[name])), name
        assert_all_same(plain_metrics[name.removeprefix("mis_")], megatron.metrics[name], name)
