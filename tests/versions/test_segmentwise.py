"""The behavior weight of segment-wise decoupled PPO, and its metrics by age.

Each is compared with a float64 oracle. Identities tie the weight to the standard one, and metrics add.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import segmentwise_oracle as oracle
import torch
from hypothesis import given
from segmentwise_oracle import Spec, Token
from segmentwise_rows import CURRENT, applied, config_of, flat, numerator_of, rows, specs, written_of
from tolerances import step_atol, step_weight_atol, weight_rtol

from lab.break_it import segments
from lab.host.asynchronous.measure import loglinear_error_by_age
from mis_plugins.errors import InputError
from mis_plugins.metrics.staleness import AGES, metrics_by_age, weight_metrics, weights_by_age
from mis_plugins.metrics.totals import Partials
from mis_plugins.versions.segment_wise import SegmentWiseConfig, Written, admitted, lacking, proximal_t


@given(rows)
def test_loglinear(row: list[Token]):
    expected = [oracle.numerator(token, Spec(method="loglinear")) for token in row]
    found = numerator_of(row, SegmentWiseConfig(method="loglinear"))
    for value, truth in zip(found.tolist(), expected, strict=True):
        assert math.isnan(value) if truth is None else value == pytest.approx(truth, rel=weight_rtol(0))


@given(segments.cases())
def test_weight(case: segments.Case):
    """What stands under the mask, and is no log-prob, changes nothing."""
    segments.judge(case)


@given(rows)
def test_off_is_standard(row: list[Token]):
    """The same tensor, not an equal one: no kernel runs."""
    proximal = flat(row, "proximal")
    none = Written(torch.empty(0, dtype=torch.int64), torch.empty(0), CURRENT)
    assert proximal_t(proximal, flat(row, "behavior"), none, SegmentWiseConfig(enabled=False)) is proximal


def test_no_gradient():
    proximal = torch.tensor([-1.0], requires_grad=True)
    written = Written(torch.tensor([8]), torch.tensor([math.nan]), CURRENT)
    assert not proximal_t(proximal, proximal, written, SegmentWiseConfig()).requires_grad


# Samples that cannot be weighed.


def sample(versions: list[int], stored: list[float] | None = None) -> Written:
    return Written(torch.tensor(versions), torch.tensor(stored or [math.nan] * len(versions)), CURRENT)


ALL = [torch.ones(3, dtype=torch.bool)]


@pytest.mark.parametrize(
    ("one", "valid", "config", "left"),
    [
        (sample([9, 7, 6], [math.nan, math.nan, -1.0]), [1, 1, 1], SegmentWiseConfig(too_old="drop"), [1, 0, 1]),
        (sample([-1, 8, 9]), [0, 1, 1], SegmentWiseConfig(), [0, 1, 1]),
        (sample([-1, 0, 12]), [1, 1, 1], SegmentWiseConfig(enabled=False), [1, 1, 1]),
    ],
    ids=["too old is dropped", "masked tokens may be of no version", "off admits everything"],
)
def test_which_tokens_are_left(one: Written, valid: list[int], config: SegmentWiseConfig, left: list[int]):
    (mask,) = admitted(["a"], [one], [torch.tensor(valid).bool()], config)
    assert mask.dtype == torch.bool and mask.tolist() == left


def test_a_token_of_no_version_lacks_its_weight():
    assert lacking(sample([-1, 8, 9]), SegmentWiseConfig()).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("name", "versions", "too_old", "said"),
    [
        ("group 4/1", [9, 7, 7], "raise", r"sample group 4/1, token 1: version 7, with the trainer at 9.*too_old"),
        ("a", [-1, 8, 9], "drop", "sample a, token 0: version -1.*no version wrote it"),
        ("a", [8, 9, 10], "drop", "sample a, token 2: version 10, with the trainer at 9.*not reached"),
    ],
)
def test_a_sample_that_cannot_be_weighed_is_named(name: str, versions: list[int], too_old: Any, said: str):
    with pytest.raises(InputError, match=said):
        admitted([name], [sample(versions)], ALL, SegmentWiseConfig(too_old=too_old))


def test_a_sample_without_a_name_or_a_mask_is_not_passed_over():
    for names, masks in ((["a"], ALL * 2), (["a", "b"], ALL)):
        with pytest.raises(ValueError, match="zip"):
            admitted(names, [sample([9, 9, 9])] * 2, masks, SegmentWiseConfig())


# ------------------------------------------------------------------------------------------------- metrics by age


def measured(row: Sequence[Token], config: SegmentWiseConfig) -> Partials:
    numerator, behavior, valid = (numerator_of(row, config), flat(row, "behavior"), flat(row, "valid", torch.bool))
    weighed = applied(numerator, behavior, valid, config)
    return weights_by_age(numerator, flat(row, "proximal"), behavior, written_of(row), valid, weighed)


def errors(row: Sequence[Token]) -> Partials:
    valid = flat(row, "valid", torch.bool)
    return loglinear_error_by_age(flat(row, "proximal"), flat(row, "behavior"), written_of(row), valid)


def groups(row: Sequence[Token]) -> dict[str, list[Token]]:
    """All tokens, and those of each age, as the metrics name them."""
    found = {"": list(row)}
    for token in row:
        known = 0 <= token.age and token.version >= 0
        found.setdefault(f"/age_{token.age}" if known else "/no_age", []).append(token)
    return found


RATIO = math.exp(2)  # of one token at most: see `segmentwise_rows.tokens`
FLOAT32 = ("avg", "variance", "min", "max", "ess")  # of applied weights; the others are float64 throughout


def tolerance(name: str, terms: int) -> float:
    kind = name.removeprefix("behav_imp_weight/")
    return step_weight_atol(terms, RATIO**2) if kind in FLOAT32 else step_atol(terms, RATIO**2)


def expected_weights(row: Sequence[Token], spec: Spec) -> dict[str, float]:
    valid = [token for token in row if token.valid]
    known = [token for token in valid if oracle.numerator(token, spec) is not None]
    found = {"staleness/tokens": float(len(known)), "staleness/unknown": float(len(valid) - len(known))}
    kept = [w for w, stays in (oracle.weight(token, spec) for token in known) if stays]
    if kept:
        found["behav_imp_weight/avg"] = math.fsum(kept) / len(kept)
        found["behav_imp_weight/variance"] = oracle.variance(kept)
        found["behav_imp_weight/min"], found["behav_imp_weight/max"] = min(kept), max(kept)
        found["behav_imp_weight/ess"] = oracle.effective_share(kept) if any(kept) else 0.0
    if known:
        steps = [oracle.numerator(token, spec) - token.behavior for token in known]  # type: ignore[operator]
        found["behav_imp_weight/var/segment_wise"] = oracle.variance([math.exp(x) for x in steps])
        standard = [math.exp(token.proximal - token.behavior) for token in known]
        found["behav_imp_weight/var/standard"] = oracle.variance(standard)
        found["behav_kl/avg"] = -math.fsum(steps) / len(steps)
        found["staleness/avg"] = math.fsum(token.age for token in known) / len(known)
    return found


@given(rows, specs)
def test_weights(row: list[Token], spec: Spec):
    metrics = weight_metrics(measured(row, config_of(spec)))
    # A root amplifies what rounding leaves near 0: variances are compared.
    metrics = {
        name.replace("/std", "/variance"): value**2 if "/std" in name else value for name, value in metrics.items()
    }
    for suffix, part in groups(row).items():
        wanted = expected_weights(part, spec)
        if suffix and not (wanted["staleness/tokens"] or wanted["staleness/unknown"]):
            continue
        for name, value in wanted.items():
            assert metrics.pop(name + suffix) == pytest.approx(value, abs=tolerance(name, len(row))), name + suffix
    assert metrics == {}


@given(rows)
def test_loglinear_error(row: list[Token]):
    counted = [
        token for token in row if token.valid and token.version >= 0 and token.age >= 2 and token.recomputed is not None
    ]
    metrics = metrics_by_age(errors(row))
    if not counted:
        assert metrics == {}
        return
    gaps = [oracle.numerator(token, Spec(method="loglinear")) - token.recomputed for token in counted]  # type: ignore[operator]
    steps = [token.recomputed - token.behavior for token in counted]  # type: ignore[operator]
    mean_square = lambda xs: math.fsum(x * x for x in xs) / len(xs)  # noqa: E731
    expected = {
        "avg": math.fsum(gaps) / len(gaps), "abs": math.fsum(map(abs, gaps)) / len(gaps),
        "rms": math.sqrt(mean_square(gaps)), "max": max(map(abs, gaps)), "step_rms": math.sqrt(mean_square(steps)),
    }  # fmt: skip
    for name, value in expected.items():
        # The line is drawn in float32, at log-probs of at most 10 in size.
        assert metrics[f"loglinear/error/{name}"] == pytest.approx(value, abs=step_weight_atol(len(row), 10.0))


def test_the_last_age_holds_all_above():
    tokens = [Token(-1.0, -1.0, -1.0, 0, version) for version in (AGES - 2, AGES - 1, AGES + 40)]
    found: list[Partials] = []
    for token in tokens:
        written = replace(written_of([token]), current=token.current)
        one = torch.tensor([-1.0])
        valid = torch.tensor([True])
        weighed = applied(one, one, valid, SegmentWiseConfig())
        found.append(weights_by_age(one, one, one, written, valid, weighed))
    metrics = weight_metrics(functools.reduce(Partials.merge, found))
    assert metrics["staleness/tokens/age_16_up"] == 2 and metrics["staleness/tokens/age_15"] == 1
    assert metrics["staleness/avg"] == (AGES - 2 + AGES - 1 + AGES + 40) / 3


def test_what_was_not_stored_is_not_taken_for_what_is_not_finite():
    """NaN stands for a log pi_{v+1} that nobody stored; an infinite one was."""
    numerator, one, valid = (torch.tensor([math.nan, -math.inf, -1.0]), torch.full((3,), -1.0), torch.ones(3).bool())
    weighed = applied(numerator, one, valid, SegmentWiseConfig())
    written = written_of([Token(-1.375, -1.0, -1.125, CURRENT - 3, CURRENT)] * 3)
    row = weights_by_age(numerator, one, one, written, valid, weighed).named_sums
    assert (row["tokens"], row["unknown"], row["nonfinite"]) == (1, 2, 1)
