"""The loadable function against the float64 oracle, over the product of configs and ragged batches."""

import itertools
import math
from dataclasses import replace

import oracle
import pytest
import torch
from batches import (
    BOUNDS,
    LEVELS,
    Batch,
    batches,
    broken_batches,
    configs,
    flat_configs,
    host_args,
    make_batch,
    nested,
    ratio_batch,
)
from drive import Outcome, assert_matches_oracle, corrected, run, same_bytes
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tolerances import DECISION, normalized_rtol

from mis_plugins import mis
from mis_plugins.correction.pipeline import denominator_scale

REJECTS = ("none", "token", "sum", "mean", "min", "max", "sum and min")
NORMALIZE = (None, "valid", "kept")


def check(batch: Batch, config: dict, **settings: object) -> Outcome:
    """Compare with the oracle, unless a decision lies within float32 rounding of its bound."""
    expected = oracle.correct(batch.samples, config)
    assume(expected.margin > DECISION)
    outcome = run(batch, None, **settings) if settings else run(batch, config)
    assert_matches_oracle(outcome, batch, expected, config.get("metrics", "full") == "full")
    return outcome


def agreed(batch: Batch, config: dict, per_token: bool = False) -> Outcome:
    """What oracle and hook agree on, for a batch that keeps clear of every bound."""
    expected = oracle.correct(batch.samples, config)
    assert expected.margin > DECISION, "the batch must keep clear of the bounds"
    outcome = run(batch, config, calculate_per_token_loss=per_token)
    assert_matches_oracle(outcome, batch, expected, per_token=per_token)
    return outcome


@given(batches(), configs())
def test_nested_config(batch: Batch, config: dict):
    check(batch, config)


@given(batches(), flat_configs())
def test_flat_keys(batch: Batch, flat: dict):
    check(batch, nested(flat), **flat)


@given(broken_batches(), configs())
@example(
    make_batch([([0.0, 0.0], [math.nan, 0.0], [1, 1])]),
    {"weight": None, "reject": [{"over": "sum", "lower": 0.1}], "denominator": "kept", "on_all_rejected": "keep"},
)
def test_non_finite_rollout_log_probs(batch: Batch, config: dict):
    """A valid token whose rollout log-prob is NaN or infinite: weight 0, out of every mean, fails its rules."""
    outcome = check(batch, config)
    assert all(torch.isfinite(x).all() for rows in outcome.metrics.values() for x in rows)


@given(batches() | broken_batches(), st.data())
def test_rules_over_routes(batch: Batch, data: st.DataObject):
    """Numbers of layers that route a token otherwise, handed for every token, the masked and the broken ones too."""
    over = data.draw(st.sampled_from(["token", "sum", "mean", "min", "max"]))
    unit = {} if over == "token" else {"unit": data.draw(st.sampled_from(["sequence", "segment"]))}
    rule = {"statistic": "route", "over": over, "upper": data.draw(st.sampled_from([0.45, 1.3, 4.2])), **unit}
    if over == "token" and data.draw(st.booleans()):
        rule["down_weigh"] = 0.25
    rows = [[float(data.draw(st.integers(0, 3))) for _ in range(n)] for n in batch.response_lengths]
    samples = [replace(one, routes=row) for one, row in zip(batch.samples, rows, strict=True)]
    config = {"weight": None, "reject": [rule]}
    expected = oracle.correct(samples, config)
    found = corrected(batch, config, torch.tensor(sum(rows, [])))
    assert found.keep.tolist() == sum(expected.keep, [])
    assert found.weights.tolist() == sum(expected.weights, [])


@pytest.mark.parametrize("level", [*LEVELS, None])
def test_a_down_weighed_token_is_kept(level: str | None):
    """Against the same rule that drops: ratios of sequences, masks and counts are those of no rule."""
    batch = ratio_batch(WIDE, MASKS)
    weight = level and {"level": level, "bound": "clip", "lower": 0.3, "upper": 2.75}
    rule = {"over": "token", "lower": 0.5, "upper": 2.5}
    far = [not 0.5 <= ratio <= 2.5 for row in WIDE for ratio in row]
    plain, dropped, lowered = (
        run(batch, {"weight": weight, "reject": rules})
        for rules in ([{"over": "token", "upper": 100.0}], [rule], [rule | {"down_weigh": 0.25}])
    )
    assert all(map(same_bytes, lowered.masks, plain.masks)) and sum(far) == 4
    of = [torch.cat(one.weights) for one in (plain, lowered, dropped)]
    factor = torch.where(torch.tensor(far), 0.25, 1.0)
    assert same_bytes(of[1], of[0] * factor) and same_bytes(of[2], torch.where(torch.tensor(far), 0.0, of[0]))
    assert torch.equal(torch.cat(lowered.metrics["mis_kept_fraction"]), torch.cat(plain.metrics["mis_kept_fraction"]))
    shares = [torch.cat(one.metrics["mis_rs_mask_fraction_high"]) for one in (lowered, dropped)]
    assert same_bytes(*shares)


@pytest.mark.parametrize("weight", [None, {"upper": 2.0}])
@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, None), (torch.float16, None), (torch.float64, None), (torch.float32, "meta")]
)
def test_the_defaults_of_torch_change_nothing(dtype: torch.dtype, device: str | None, weight: dict | None):
    """A host that makes its model in bfloat16 may leave the default so: 0.1 would read 0.10009765625."""
    lists = ratio_batch(WIDE, MASKS).lists()
    reject = [{"over": "token", "upper": 1.15, "down_weigh": 0.1}, {"over": "mean", "upper": 1.25}]
    args = host_args(mis={"weight": weight, "reject": reject})
    expected, before = mis.compute_mis_weights(args, **lists), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        weights, _, metrics = mis.compute_mis_weights(args, **lists)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert weights is not None and expected[0] is not None and all(map(same_bytes, weights, expected[0]))
    assert all(same_bytes(*pair) for name in metrics for pair in zip(metrics[name], expected[2][name], strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_the_mean_is_of_the_weights_of_tokens_down_weighed(level: str):
    """At token level the mean weight is 1 after normalization; a unit enters its mean without the factor."""
    batch = ratio_batch(WIDE, MASKS)
    weight = {"level": level, "bound": "clip", "lower": 0.3, "upper": 2.75, "normalize": {"over": "valid"}}
    config = {"weight": weight, "reject": [{"over": "token", "upper": 1.15, "down_weigh": 0.25}]}
    outcome = agreed(batch, config)
    expected, plain = (oracle.correct(batch.samples, x) for x in (config, config | {"reject": []}))
    assert (expected.factor == plain.factor) == (level != "token")
    if level == "token":
        valid = torch.cat(outcome.weights)[batch.flat_mask]
        assert valid.mean().item() == pytest.approx(1, rel=normalized_rtol(1))


def product() -> list[tuple]:
    """Level x bound x rejection, each with normalizations in turn."""
    normalize = itertools.cycle(NORMALIZE)
    points = ((*point, next(normalize)) for point in itertools.product(LEVELS, BOUNDS, REJECTS))
    return [p for p in points if p[3] != "kept" or p[2] != "none" or BOUNDS[p[1]].drops_token]


def rules_of(name: str) -> list[dict]:
    bounds = {"lower": 0.5, "upper": 1.5}
    veto = {"over": "min", "lower": 0.2}
    choices = {"none": [], "min": [veto], "sum and min": [{"over": "sum", **bounds}, veto]}
    return choices[name] if name in choices else [{"over": name, **bounds}]


# Ratios on both sides of every bound below, at each level, and a fully masked, an empty and a single-token sequence.
WIDE = [[0.9, 1.1, 1.05], [0.1, 1.2], [3.0, 0.9, 1.0, 0.6], [1.3], [], [7.0, 1e-3], [1.01, 0.98, 0.55, 1.7]]
MASKS = [[1, 1, 1], [1, 1], [1, 0, 1, 1], [1], [], [0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(("level", "bound", "reject", "over"), product())
def test_every_point_of_the_product(level: str, bound: str, reject: str, over: str | None):
    """On one batch where level, bound, rejection and normalization each matter."""
    batch = ratio_batch(WIDE, MASKS)
    weight: dict = {"level": level, "bound": bound}
    record = BOUNDS[bound]
    weight |= {"upper": 1.25} if record.has_ceiling else {}
    weight |= {"lower": 0.7} if record.has_floor else {}
    if over:
        weight["normalize"] = {"scope": "micro_batch", "over": over}
    agreed(batch, {"weight": weight, "reject": rules_of(reject)})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bound", BOUNDS)
def test_where_the_host_averages_over_tokens(level: str, bound: str):
    """`--calculate-per-token-loss` divides by tokens, of which a fully masked sample counts as one."""
    batch, weight = ratio_batch(WIDE, MASKS), {"level": level, "bound": bound, "normalize": {"over": "valid"}}
    weight |= {"upper": 1.25} if BOUNDS[bound].has_ceiling else {}
    agreed(batch, {"weight": weight, "reject": rules_of("sum and min")}, per_token=True)


SEGMENTS = {"over": "mean", "unit": "segment", "lower": 0.8, "upper": 1.15}


@pytest.mark.parametrize(
    "config",
    [
        {"weight": None, "reject": [SEGMENTS, {"over": "sum", "lower": 0.7}], "aggregate": "kept"},
        {"weight": None, "reject": [SEGMENTS, {"over": "sum", "lower": 0.7, "aggregate": "kept"}]},
        {"weight": {"level": "sequence", "bound": "clip", "upper": 2.0}, "reject": [SEGMENTS], "aggregate": "kept"},
        {"weight": {"level": "segment_geometric", "bound": "mask", "lower": 0.8, "upper": 1.15},
         "reject": [{"over": "sum", "lower": 0.7, "aggregate": "kept"}]},
    ],
)  # fmt: skip
def test_sequences_add_up_what_segments_alone_leave(config: dict):
    """`aggregate: kept` without a rule or mask bound on tokens, and not the same as `valid` on this batch."""
    batch = ratio_batch(
        [[1.05, 0.95, 9.0, 0.3], [1.0, 1.1], [0.5, 2.0, 1.1, 1.02]], [[1, 1, 0, 1], [1, 1], [1, 0, 1, 1]]
    )
    outcome = agreed(batch, config)
    rules = [{k: v for k, v in rule.items() if k != "aggregate"} for rule in config["reject"]]
    plain = run(batch, config | {"reject": rules, "aggregate": "valid"})
    assert not all(map(torch.equal, outcome.masks + outcome.weights, plain.masks + plain.weights))


def test_a_sequence_stays_where_the_rules_of_every_population_keep_it() -> None:
    """The first passes neither kind of rule, the second and third one each; the last passes both."""
    rules = [
        {"over": "token", "upper": 3.0},
        {"over": "max", "upper": 5.0},
        {"over": "mean", "lower": 0.8, "aggregate": "kept"},
    ]
    outcome = agreed(ratio_batch([[6.0, 0.5], [6.0, 1.0], [1.0, 0.5], [3.5, 1.0]]), {"weight": None, "reject": rules})
    assert [mask.tolist() for mask in outcome.masks] == [[0, 0], [0, 0], [0, 0], [0, 1]]


def test_no_token_kept_has_no_scale() -> None:
    found = denominator_scale(torch.tensor([4.0, 4.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]))
    assert found.tolist() == [2, 0, 0]
