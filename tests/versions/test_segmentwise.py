"""The behavior weight of segment-wise decoupled PPO: against a float64 oracle, and what ties it to the standard one."""

import math
from dataclasses import replace
from typing import Any

import pytest
import segmentwise_oracle as oracle
import torch
from drive import same_bytes
from hypothesis import given
from hypothesis import strategies as st
from segmentwise_oracle import Spec, Token
from segmentwise_rows import CURRENT, applied, config_of, flat, numerator_of, rows, specs
from tolerances import weight_rtol

from mis_plugins.errors import InputError
from mis_plugins.versions.segment_wise import SegmentWiseConfig, Written, admitted, lacking, loglinear, proximal_t


@given(rows, specs)
def test_numerator(row: list[Token], spec: Spec):
    expected = [oracle.numerator(token, spec) for token in row]
    found = numerator_of(row, config_of(spec)).double().tolist()
    assert [None if math.isnan(x) else x for x in found] == expected


@given(rows)
def test_loglinear(row: list[Token]):
    expected = [oracle.numerator(token, Spec(method="loglinear")) for token in row]
    found = numerator_of(row, SegmentWiseConfig(method="loglinear"))
    for value, truth in zip(found.tolist(), expected, strict=True):
        assert math.isnan(value) if truth is None else value == pytest.approx(truth, rel=weight_rtol(0))


@given(rows, specs)
def test_weight(row: list[Token], spec: Spec):
    config = config_of(spec)
    answer = applied(numerator_of(row, config), flat(row, "behavior"), flat(row, "valid", torch.bool), config)
    for token, weight, keep in zip(row, answer.weights.tolist(), answer.keep.tolist(), strict=True):
        value, stays = oracle.weight(token, spec)
        assert keep == stays
        assert weight == pytest.approx(value, rel=weight_rtol(2.0), abs=0)


@given(rows)
def test_off_is_standard(row: list[Token]):
    """The same tensor, not an equal one: no kernel runs."""
    proximal = flat(row, "proximal")
    none = Written(torch.empty(0, dtype=torch.int64), torch.empty(0), CURRENT)
    assert proximal_t(proximal, flat(row, "behavior"), none, SegmentWiseConfig(enabled=False)) is proximal


@given(rows, st.sampled_from(["truncate", "mask"]))
def test_masked_garbage_changes_nothing(row: list[Token], mode: str):
    config = SegmentWiseConfig(mode=mode)  # type: ignore[arg-type]
    valid = flat(row, "valid", torch.bool)
    clean = applied(numerator_of(row, config), flat(row, "behavior"), valid, config)
    poisoned = [token if token.valid else replace(token, proximal=math.nan, behavior=math.inf) for token in row]
    answer = applied(numerator_of(poisoned, config), flat(poisoned, "behavior"), valid, config)
    assert same_bytes(clean.weights, answer.weights) and torch.equal(clean.keep, answer.keep)


def test_no_gradient():
    proximal = torch.tensor([-1.0], requires_grad=True)
    written = Written(torch.tensor([8]), torch.tensor([math.nan]), CURRENT)
    assert not proximal_t(proximal, proximal, written, SegmentWiseConfig()).requires_grad


def test_loglinear_is_exact_on_a_line():
    """Every update moves the log-prob by the same: the first lies one of them from the behavior policy."""
    age = torch.arange(1, 9)
    behavior, step = torch.full((8,), -2.0), 0.125
    assert loglinear(behavior + step * age, behavior, age).tolist() == [-2.0 + step] * 8


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
