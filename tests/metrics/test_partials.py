"""The metrics of a step: against numpy over all of its tokens, and the same however the step is split."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import drive
import numpy as np
import oracle
import pytest
import step_oracle
import torch
from batches import Batch, batches, broken_batches, configs, make_batch, ratio_batch
from hypothesis import assume, given
from hypothesis import strategies as st
from tolerances import DECISION, EPS64, step_atol, step_weight_atol
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import Correction
from mis_plugins.metrics import sketch, tokens
from mis_plugins.metrics.partials import METRICS, finalize, partials
from mis_plugins.metrics.quantity import QUANTILES
from mis_plugins.metrics.tokens import Tokens, of_kept, of_usable, of_valid
from mis_plugins.metrics.totals import Partials
from mis_plugins.packing.ragged import Ragged, Responses

SPLIT_DEPENDENT = ("micro_batches", "all_rejected")


def corrected(batch: Batch, config: CorrectionConfig, routes: Tensor | None = None) -> Correction:
    """The whole batch on one rank, with every total that the rows read."""
    return replace(drive.corrected(batch, replace(config, metrics="all"), routes), config=config)


def shard(c: Correction, owned: list[list[int]]) -> Correction:
    """What one context-parallel rank holds: its tokens, and the totals of all."""
    starts = c.ragged.cu_seqlens.tolist()
    index = torch.tensor([s + t for s, piece in zip(starts[:-1], owned, strict=True) for t in piece], dtype=torch.long)
    ends = torch.tensor([0, *map(len, owned)]).cumsum(0)
    held = {field.name: getattr(c.stage, field.name) for field in fields(c.stage)}
    stage = replace(c.stage, **{name: x[index] for name, x in held.items() if isinstance(x, Tensor)})
    whole = Responses(c.ragged.cu_seqlens, c.ragged.loss_mask, index)
    ragged = Ragged(ends, c.ragged.loss_mask[index], responses=whole)
    return replace(c, ragged=ragged, stage=stage, weights=c.weights[index])


def split(batch: Batch, parts: Sequence[Sequence[int]], config: CorrectionConfig, cp: int) -> list[Partials]:
    """One micro-batch a part, each on `cp` ranks."""
    found = []
    for part in parts:
        piece = batch.select(part)
        c = corrected(piece, config)
        loss = piece.pg_loss().detach() if part else None
        for rank in range(cp):
            _, owned = piece.shard(cp, rank, None)
            local = shard(c, owned)
            mine = loss_of(batch, part, owned) if loss is not None else None
            found.append(partials(local, mine, ages_of(batch, part, owned), counts_sequences=rank == 0))
    return found


def loss_of(batch: Batch, part: Sequence[int], owned: list[list[int]]) -> Tensor:
    """A token's loss is the same in whatever part it comes."""
    losses = batch.pg_loss().detach().split(batch.response_lengths)
    return torch.cat([losses[i][piece] for i, piece in zip(part, owned, strict=True)])


def ages_of(batch: Batch, part: Sequence[int], owned: list[list[int]]) -> Tensor:
    """Ages from one that is not known to one beyond the last column."""
    ages = (torch.arange(sum(batch.response_lengths)) % 19 - 1).split(batch.response_lengths)
    return torch.cat([ages[i][piece] for i, piece in zip(part, owned, strict=True)])


def merged(parts: Sequence[Partials]) -> Partials:
    first, *rest = parts
    for other in rest:
        first = first.merge(other)
    return first


def whole_step(batch: Batch, config: CorrectionConfig) -> Partials:
    return merged(split(batch, [range(len(batch.loss_masks))], config, cp=1))


# ------------------------------------------------------------------------------------------------ whatever the split


@given(batches(min_sequences=1) | broken_batches(), configs(metrics="full"), st.sampled_from([1, 2, 3, 4]), st.data())
def test_any_split_adds_up_to_the_same(batch: Batch, config: dict, cp: int, data: st.DataObject):
    """Micro-batches, their order, data-parallel and context-parallel ranks."""
    if config["weight"]:
        config["weight"].pop("normalize", None)  # a mean over the micro-batch depends on the split by its nature
    config.pop("on_all_rejected", None)
    parsed = from_mapping(config)
    order = data.draw(st.permutations(range(len(batch.loss_masks))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True) if a < b]
    one, many = whole_step(batch, parsed), split(batch, parts, parsed, cp)
    assert_same(merged(many), one, batch, parsed)
    assert_same(merged(data.draw(st.permutations(many))), one, batch, parsed)


def assert_same(many: Partials, one: Partials, batch: Batch, config: CorrectionConfig) -> None:
    assert many.names == one.names
    assert torch.equal(many.added["histograms"], one.added["histograms"])
    assert torch.equal(many.largest["maxima"], one.largest["maxima"])
    scale = operand_sizes(batch, config)
    terms = sum(batch.response_lengths) + 4
    sums = many.named_sums
    for name, y in one.named_sums.items():
        if name not in SPLIT_DEPENDENT:
            row = name.rpartition("/")[2]
            assert abs(sums[name] - y) <= EPS64 * terms * max(scale.get(row, 0.0), scale["any"], abs(y)), name
    products = many.added["products"], one.added["products"]
    torch.testing.assert_close(*products, rtol=EPS64 * terms, atol=0)
    found, expected = finalize(many, config), finalize(one, config)
    assert found.keys() == expected.keys()


def operand_sizes(batch: Batch, config: CorrectionConfig) -> dict[str, float]:
    """Sum of the sizes of what enters each sum over tokens; `any`: of what enters those that cancel, k3 among them."""
    t = Tokens.of(corrected(batch, config), batch.pg_loss().detach())
    rows = {q.name: q.values.double() for q in (*of_usable(t), *of_valid(t), *of_kept(t))}
    sizes = {name: float(row.abs().sum()) for name, row in rows.items()}
    sizes |= {f"{name}_squared": float(row.square().sum()) for name, row in rows.items()}
    far = t.log_ratio.abs()
    operands = rows["ratio"] * (1 + far.clamp(max=20)) + far + t.log_probs.abs().sum(0)
    return sizes | {"any": float(operands.sum()) + 1}


# ------------------------------------------------------------------------------------------------ against the oracle


@st.composite
def exact_batches(draw: Callable) -> Batch:
    """Log-probs in steps of 1/256 and at most 3 apart, so that float32 holds their difference as it is."""
    batch = draw(batches(min_sequences=1) | broken_batches())
    steps = lambda x: x.float().mul(256).round().div(256)  # noqa: E731
    behavior = [steps(b) for b in batch.behavior]
    rows = zip(batch.proximal, behavior, strict=True)
    return replace(batch, behavior=behavior, proximal=[steps(p.float()).clamp(b - 3, b + 3) for p, b in rows])


@given(exact_batches(), configs(metrics="full"))
def test_the_oracle_agrees(batch: Batch, config: dict):
    samples = batch.samples
    expected = oracle.correct(samples, config)
    losses = [row.tolist() for row in batch.pg_loss().detach().double().split(batch.response_lengths)]
    wanted, everything = step_oracle.step_metrics(samples, config, expected, losses)
    assume(min(expected.margin, *everything.gaps) > DECISION)
    parsed = from_mapping(config)
    found = finalize(whole_step(batch, parsed), parsed)
    for name, value in wanted.items():
        assert_metric(name, found.get(name, math.nan), value, everything)
    for name, data in step_oracle.percentile_data(everything).items():
        for percent in QUANTILES:
            assert_percentile(name, percent, found, np.sort(data))
    unknown = {name for name in found if name not in wanted and not NOT_OF_THE_ORACLE.match(name)}
    of_kept = "kept" in {config.get("aggregate"), *(rule.get("aggregate") for rule in config["reject"])}
    assert not unknown or of_kept


@given(exact_batches(), st.data())
def test_the_oracle_agrees_on_rules_over_routes(batch: Batch, data: st.DataObject):
    rows = [[float(data.draw(st.integers(0, 3))) for _ in range(n)] for n in batch.response_lengths]
    rule = {"statistic": "route", "over": data.draw(st.sampled_from(["token", "sum", "max"])), "upper": 1.5}
    config = {"weight": None, "reject": [rule], "metrics": "full"}
    samples = [replace(one, routes=row) for one, row in zip(batch.samples, rows, strict=True)]
    wanted, everything = step_oracle.step_metrics(samples, config, oracle.correct(samples, config))
    parsed = from_mapping(config)
    found = finalize(partials(corrected(batch, parsed, torch.tensor(sum(rows, [])))), parsed)
    of_rule = [name for name in wanted if name.startswith("rule_1_")]
    assert of_rule
    for name in of_rule:
        assert_metric(name, found.get(name, math.nan), wanted[name], everything)


NOT_OF_THE_ORACLE = re.compile(r"lag_|all_rejected|slope|ratio_mean_error|.*_p\d\d$")


def assert_metric(name: str, found: float, value: float, s: step_oracle.Everything) -> None:
    if name.endswith("correlation"):
        return assert_correlation(name, found, value, s)
    assert math.isnan(found) == math.isnan(value), (name, found, value)
    if math.isnan(value):
        return None
    weights = max([1.0, *s.bounded, *s.weights])
    size = max(abs(value), s.sizes.get(name, 1.0), weights if OF_WEIGHTS.match(name) else 1.0)
    atol = (step_weight_atol if OF_WEIGHTS.match(name) else step_atol)(len(s.usable), size)
    if name.endswith("std"):  # the root of a difference of squares, and it is those whose rounding is bounded
        return drive.assert_close(found**2, value**2, 0.0, atol * size, name)
    return drive.assert_close(found, value, 0.0, atol, name)


OF_WEIGHTS = re.compile("weight|kept_weight|applied|ess|sequence_weight|sequence_applied|normalization|loss|rule")


def assert_correlation(name: str, found: float, value: float, s: step_oracle.Everything) -> None:
    """The error of a covariance, over two spreads; nothing can be said of a side that is constant."""
    first, second = (np.exp(s.p), np.exp(s.q)) if name == "prob_correlation" else (s.p, s.q)
    spreads = float(np.std(first) * np.std(second)) if len(first) else 0.0
    size = float(np.max(np.abs([first, second]), initial=1.0)) ** 2
    if spreads > 100 * step_atol(len(first), size):
        drive.assert_close(found, value, 0.0, 4 * step_atol(len(first), size) / spreads, name)


@pytest.mark.parametrize("name", ["prob_correlation", "log_prob_correlation"])
def test_a_side_that_does_not_vary_has_no_correlation(name: str) -> None:
    """The difference of its mean square and squared mean is rounding, which a quotient would show as a number."""
    config = CorrectionConfig(metrics="all")
    for varied in ([-0.5] * 20, (-torch.rand(20, generator=torch.Generator().manual_seed(1))).tolist()):
        made = corrected(make_batch([([-0.51] * 20, varied, [1] * 20)]), config)
        assert math.isnan(finalize(partials(made), config).get(name, math.nan))


def assert_percentile(name: str, percent: int, found: dict[str, float], ordered: np.ndarray) -> None:
    """Of two order statistics, each within what the sketch promises."""
    if not len(ordered):
        assert f"{name}_p{percent}" not in found
        return
    rank = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    if math.isinf(low) or math.isinf(high):
        return  # a weight of 0
    share = rank - math.floor(rank)
    value = found[f"{name}_p{percent}"]
    value = value if name == "sequence_log_ratio" else math.log(value)
    bound = sketch.RELATIVE_ERROR * ((1 - share) * abs(low) + share * abs(high)) + sketch.SMALLEST
    rounding = step_weight_atol(len(ordered), max(1.0, abs(low), abs(high)))
    drive.assert_close(value, low + share * (high - low), 0.0, bound + rounding, f"{name}_p{percent}")


# ------------------------------------------------------------------------------------------------------- identities


def step_of(batch: Batch, **config: object) -> dict[str, float]:
    parsed = from_mapping({"weight": None, "metrics": "full"} | config)
    return finalize(whole_step(batch, parsed), parsed)


def test_the_clamp_acts_inside_exp_alone():
    """A ratio of e^50 reads e^20, its logarithm 50."""
    found = step_of(make_batch([([-1.0], [-51.0], [1])]))
    assert found["reverse_kl_k1"] == pytest.approx(50 * math.exp(20))
    assert found["reverse_kl_k2"] == pytest.approx(50**2 / 2 * math.exp(20))
    assert found["reverse_kl_k3"] == pytest.approx(49 * math.exp(20) + 1)


def test_the_ratio_of_a_sequence_of_segments_is_theirs():
    """Two turns, of 0.5 * 0.5 and of 1: their mean over tokens is 0.5, where that of the tokens is 2 / 3."""
    batch = make_batch([([-1.0, -1.0, -1.0, -1.0], [math.log(2) - 1] * 2 + [0.0, -1.0], [1, 1, 0, 1])])
    weight = {"level": "segment", "bound": "zero", "lower": 0.6, "upper": 2.0}
    assert step_of(batch, weight=weight)["sequence_ratio_low_fraction"] == 1.0


@pytest.mark.parametrize("over", ["sum", "mean", "max"])
def test_a_probability_beyond_every_float_lies_above_the_limit(over: str):
    """A trainer's log-prob of 200 is no 0: the rule drops its sequence. A masked sequence is no number at all."""
    batch = make_batch([([200.0, -1.0], [-1.0, -1.0], [1, 1]), ([-1.0], [-1.0], [1]), ([-1.0], [-1.0], [0])])
    rule = {"statistic": "proximal_prob", "over": over, "lower": 0.1, "upper": 0.9}
    found = step_of(batch, reject=[rule])
    assert found["rule_1_unit_high_fraction"] == found["rule_1_unit_rejected_fraction"] == 0.5
    assert found["rule_1_unit_low_fraction"] == 0.0
    assert found["rule_1_high_fraction"] == found["rule_1_rejected_fraction"] == pytest.approx(2 / 3)
    assert found["rule_1_min"] == pytest.approx(math.exp(-1))


@pytest.mark.parametrize(("side", "bound"), [("upper", 2.0), ("lower", 0.5)])
@pytest.mark.parametrize("over", ["token", "min", "max"])
def test_a_ratio_on_the_bound_is_kept_and_counted_so(over: str, side: str, bound: float) -> None:
    """In float32 log 2 lies above what it is in float64, and log 0.5 below."""
    batch = Batch([torch.tensor([math.log(bound)])], [torch.zeros(1)], [torch.ones(1)], [3])
    metrics = step_of(batch, weight=None, reject=[{"over": over, side: bound}])
    assert metrics["rejected_fraction"] == metrics["rule_1_unit_rejected_fraction"] == 0.0


def test_without_correction_a_lost_log_prob_leaves_the_loss_as_it_is():
    batch = make_batch([([-1.0, -2.0], [-1.5, math.nan], [1, 1])])
    parsed = from_mapping({"weight": None})
    found = finalize(partials(corrected(batch, parsed), torch.tensor([1.0, 3.0])), parsed)
    losses = ("loss_uncorrected", "loss_original_denominator", "loss_kept_denominator")
    assert [found[name] for name in losses] == [2.0] * 3


def test_all_older_tokens_belong_to_the_oldest_age():
    """Ages 7, 12 and 40 are one metric, and age 6 another."""
    batch = ratio_batch([[1.0, 2.0, 4.0, 8.0]])
    config = from_mapping({"weight": None})
    found = finalize(partials(corrected(batch, config), ages=torch.tensor([6, 7, 12, 40])), config)
    assert (found["lag_6_share"], found["lag_7_share"]) == (0.25, 0.75)
    assert found["lag_7_ratio_mean"] == pytest.approx(14 / 3, rel=1e-6)
    assert "lag_0_share" not in finalize(partials(corrected(batch, config)), config)


def test_the_mismatch_is_split_by_turn():
    """Five turns of the model, around a tool's words: the last two are one metric. What a rule rejects begins none."""
    ratios = [[9.0, 1.0, 2.0, 9.0, 4.0, 8.0, 9.0, 9.0, 1.0, 9.0, 2.0, 9.0, 0.5], [1.0, 1.0]]
    masks = [[0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1], [1, 1]]
    found = step_of(ratio_batch(ratios, masks), reject=[{"over": "token", "upper": 3.0}])
    assert [found[f"turn_{turn}_share"] for turn in (1, 2, 3, 4)] == pytest.approx([4 / 9, 2 / 9, 1 / 9, 2 / 9])
    assert found["turn_1_kl_k1"] == pytest.approx(-math.log(2) / 4, rel=1e-6)
    assert found["turn_2_ratio_mean"] == pytest.approx(6.0, rel=1e-6)
    assert found["turn_2_kept_fraction"] == 0.0 and found["turn_3_kept_fraction"] == 1.0
    assert found["turn_4_log_prob_diff_abs_mean"] == pytest.approx(math.log(2), rel=1e-6)
    assert found["turn_4_kl_k1"] == pytest.approx(0.0, abs=1e-6)
    assert "turn_5_share" not in found


def test_what_is_not_known_is_not_reported():
    nothing = step_of(make_batch([([-1.0], [-1.0], [0])]))
    assert nothing["tokens"] == 0.0
    assert "kl_k1" not in nothing and "kept_fraction" not in nothing and "ratio_p50" not in nothing


def test_names_depend_on_the_config_alone():
    config = from_mapping({"weight": {"bound": "mask"}, "reject": [{"over": "min", "lower": 0.1}]})
    c = corrected(ratio_batch([[1.0, 2.0]]), config)
    names = partials(c).names
    assert names == partials(corrected(make_batch([([], [], [])]), config), None).names
    assert len(set(names["sums"])) == len(names["sums"])
    assert not set(METRICS) & {name for _, metrics, _ in partials(c).records for name in metrics}


def test_a_mark_beside_an_unusable_token_does_not_count():
    """The statistic of an unusable token reads 0, below the rule's lower bound: the token stays outside all counts."""
    config = from_mapping({"weight": None, "reject": [{"statistic": "k3", "over": "token", "lower": 0.1}]})
    c = corrected(ratio_batch([[2.0, math.nan, 1.0]], [[1, 1, 0]]), config)
    sums = partials(c).named_sums
    assert (sums["usable"], sums["rule_1_low_fraction"], sums["valid"]) == (1, 0, 2)


def test_a_long_batch_is_added_up_in_parts(monkeypatch: pytest.MonkeyPatch):
    """Parts of 7 tokens, across sequences, add up to what one part does; the last part is shorter."""
    batch = ratio_batch([[1.0 + i / 8 + t / 64 for t in range(9)] for i in range(3)], [[1, 1, 0] * 3] * 3)
    config = from_mapping({"weight": {"upper": 1.2}, "reject": [{"over": "token", "upper": 1.3}]})
    ages, loss = torch.arange(27) % 10 - 1, batch.pg_loss().detach()
    whole = finalize(partials(corrected(batch, config), loss, ages), config)
    monkeypatch.setattr(tokens, "LONG_ON_CPU", 7)
    assert finalize(partials(corrected(batch, config), loss, ages), config) == pytest.approx(whole, rel=1e-12)
