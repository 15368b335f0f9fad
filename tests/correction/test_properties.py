"""Identities that hold by algebra, and what must not change the answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import (
    BOUNDS,
    LEVELS,
    Batch,
    batches,
    configs,
    garbage,
    host_args,
    make_batch,
    poisoned,
    ratio_batch,
    weight_configs,
)
from drive import assert_all_same, assert_same_bytes, run, same_bytes
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import UNITS, correct, host_scale, members
from tolerances import DECISION, EPS, normalized_rtol, sum_rtol, weight_rtol

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
            bool((x[m.bool()] == 0).all())
            for x, m in zip(outcome.metrics[name], batch.loss_masks, strict=True)
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


@given(batches(), weight_configs())
def test_clip_with_a_lower_bound_below_every_ratio_is_truncation(batch: Batch, weight: dict):
    smallest = math.exp(-20.0) / 2  # the clamp keeps every ratio above
    weight = weight | {"upper": weight.get("upper", 2.0)}
    weight.pop("normalize", None)
    clip = run(batch, {"weight": weight | {"bound": "clip", "lower": smallest}})
    weight.pop("lower", None)
    truncate = run(batch, {"weight": weight | {"bound": "truncate"}})
    assert_all_same(clip.weights, truncate.weights, "weights")


@given(
    st.lists(batches(max_sequences=1, max_length=1), min_size=1, max_size=4),
    weight_configs(level="geometric"),
)
def test_levels_agree_on_one_token(parts: list[Batch], weight: dict):
    """Token, sequence and geometric are the same for a sequence of one token."""
    batch = join(parts)
    found = [run(batch, {"weight": weight | {"level": level}}) for level in LEVELS]
    for other in found[1:]:
        assert_all_same(found[0].masks, other.masks, "masks")
        torch.testing.assert_close(
            torch.cat(other.weights), torch.cat(found[0].weights), rtol=4 * EPS, atol=0
        )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("over", ["valid", "kept"])
def test_normalized_weights_have_mean_one(level: str, bound: str, over: str):
    """Over valid tokens (or sequences), or over those that rejection keeps; in mask mode always over those kept."""
    batch = ratio_batch(
        [[0.9, 1.1], [0.2, 0.3, 0.4], [2.0], [1.0, 9.0, 1.2, 0.7]], [[1, 1], [1, 0, 1], [1], [1, 1, 1, 1]]
    )
    weight = {"level": level, "bound": bound, "normalize": {"over": over}}
    if bound != "none":
        weight["upper"] = 1.5
    config = {"weight": weight, "reject": [{"over": "token", "upper": 1.9}]}
    enters = correct(batch.samples, config if over == "kept" else {"weight": weight}).keep
    weights, _, _ = mis.compute_mis_weights(host_args(mis=config), **batch.lists())
    assert weights is not None
    units = []
    for row, enter, sample in zip(weights, enters, batch.samples, strict=True):
        firsts = {
            members(sample, t, UNITS[level])[0]: row[t].double().item() for t in sample.valid if enter[t]
        }
        units += list(firsts.values())
    assert abs(math.fsum(units) / len(units) - 1.0) <= sum_rtol(len(units)) + 2 * EPS


@pytest.mark.parametrize(("log_ratio", "weight"), [(-18.0, 1.0), (-19.0, math.exp(-19.0))])
def test_a_vanishing_mean_divides_nothing(log_ratio: float, weight: float):
    """Above 1e-8 the mean divides; below (e^-19 = 5.6e-9) it would only blow up rounding, and the weights stay."""
    batch = make_batch([([log_ratio] * 2, [0.0] * 2, [1, 1]), ([log_ratio], [0.0], [1])])
    for level in ("token", "geometric"):
        weights = run(batch, {"weight": {"level": level, "normalize": {}}}).weights
        torch.testing.assert_close(
            torch.cat(weights), torch.full((3,), weight), rtol=normalized_rtol(20.0), atol=0
        )


def test_a_small_drift_compounds():
    """1.001 a token over 2000 tokens: a sequence ratio of 1.001^2000 = 7.38, and a geometric one of 1.001."""
    batch = make_batch([([math.log(1.001)] * 2000, [0.0] * 2000, [1] * 2000)])
    sequence, geometric = (
        run(batch, {"weight": {"level": level, "upper": 100.0}}).weights[0][0].item()
        for level in ("sequence", "geometric")
    )
    assert sequence == pytest.approx(1.001**2000, rel=weight_rtol(2.0))
    assert geometric == pytest.approx(1.001, rel=weight_rtol(0.001))


def test_ess_counts_the_weights_really_applied():
    """(sum w)^2 / (n sum w^2): weights 1, 1, 2 and one dropped token over 4 valid ones."""
    batch = ratio_batch([[1.0, 1.0], [2.0, 9.0]])
    config = {"weight": {"upper": 3.0}, "reject": [{"over": "token", "upper": 5.0}]}
    ess = run(batch, config).metrics["mis_ess_mb"][0][0].item()
    assert ess == pytest.approx((1 + 1 + 2) ** 2 / (4 * (1 + 1 + 4)), rel=8 * EPS)


# ------------------------------------------------------------------------------------------------------ invariances


@given(batches(), configs(), garbage | st.just(3.0), garbage | st.just(-7.0))
def test_what_stands_under_the_mask_changes_not_one_bit(
    batch: Batch, config: dict, proximal: float, behavior: float
):
    clean = run(poisoned(batch, -1.0, -1.0), config)
    assert_same_bytes(clean, run(poisoned(batch, proximal, behavior), config))


@given(batches(min_sequences=2), configs(), st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_matter(batch: Batch, config: dict, random: object):
    assume(correct(batch.samples, config).margin > DECISION)
    order = list(range(len(batch.prompts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight, shuffled = run(batch, config), run(batch.select(order), config)
    assert_all_same([straight.masks[i] for i in order], shuffled.masks, "masks")
    rtol = sum_rtol(batch.flat_mask.numel() + 1)
    for position, i in enumerate(order):
        torch.testing.assert_close(shuffled.weights[position], straight.weights[i], rtol=rtol, atol=0)


@given(batches(), configs(), st.integers(1, 5))
def test_a_masked_tail_changes_not_one_bit(batch: Batch, config: dict, extra: int):
    """Padding that the mask excludes, at the end of each sequence."""
    longer = replace(batch, proximal=[pad(x, extra, math.nan) for x in batch.proximal],
                     behavior=[pad(x, extra, math.inf) for x in batch.behavior],
                     loss_masks=[pad(x, extra, 0) for x in batch.loss_masks])  # fmt: skip
    short, long = run(batch, config), run(longer, config)
    for i, n in enumerate(batch.response_lengths):
        valid = batch.loss_masks[i].bool()
        assert same_bytes(short.weights[i][valid], long.weights[i][:n][valid])
        assert same_bytes(short.masks[i], long.masks[i][:n])
        assert not long.masks[i][n:].any()
        for name in short.metrics:
            assert same_bytes(short.metrics[name][i][valid], long.metrics[name][i][:n][valid]), name


def pad(x: torch.Tensor, extra: int, value: float) -> torch.Tensor:
    return torch.cat([x, torch.full((extra,), value).to(x.dtype)])


@given(batches(), batches(), configs())
def test_a_dead_sequence_changes_nothing_for_its_neighbours(batch: Batch, ghost: Batch, config: dict):
    """An empty or fully masked sequence between the others."""
    dead = replace(ghost, loss_masks=[torch.zeros_like(m) for m in ghost.loss_masks])
    alone, beside = run(batch, config), run(join([dead, cast(batch)]), config)
    skip = len(ghost.prompts)
    for i, mask in enumerate(batch.loss_masks):
        assert same_bytes(alone.masks[i].bool(), beside.masks[skip + i].bool())
        assert same_bytes(alone.weights[i][mask.bool()], beside.weights[skip + i][mask.bool()])


def cast(batch: Batch) -> Batch:
    """In float32, which holds every value of the others: batches of one dtype can be joined."""
    return replace(
        batch, proximal=[x.float() for x in batch.proximal], behavior=[x.float() for x in batch.behavior]
    )


def join(parts: list[Batch]) -> Batch:
    parts = [cast(replace(part, loss_masks=[m.int() for m in part.loss_masks])) for part in parts]
    return Batch(
        *(
            sum((getattr(p, name) for p in parts), [])
            for name in ("proximal", "behavior", "loss_masks", "prompts")
        )
    )


@given(batches(), configs())
def test_two_calls_give_the_same_bits(batch: Batch, config: dict):
    """Under activation recompute the hook runs twice a micro-batch: it keeps no state."""
    assert_same_bytes(run(batch, config), run(batch, config))


@given(batches(), configs())
def test_inputs_are_left_alone(batch: Batch, config: dict):
    before = [x.clone() for x in batch.proximal + batch.behavior + batch.loss_masks]
    run(batch, config)
    assert_all_same(before, batch.proximal + batch.behavior + batch.loss_masks, "inputs")


def test_no_state_between_configs():
    """A call with another config in between changes nothing."""
    batch = ratio_batch([[0.5, 3.0], [1.2]])
    first = run(batch, {"weight": {"upper": 1.5, "normalize": {}}})
    run(batch, {"weight": {"level": "sequence", "bound": "mask", "upper": 1.1}})
    assert_same_bytes(first, run(batch, {"weight": {"upper": 1.5, "normalize": {}}}))


def test_the_three_functions_agree():
    """Megatron, FSDP and plain lists: one core."""
    batch = ratio_batch([[0.5, 3.0], [1.2], [0.9, 1.1, 4.0]])
    config = {
        "weight": {"level": "sequence", "upper": 1.5, "normalize": {}},
        "reject": [{"over": "sum", "upper": 5.0}],
    }
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
