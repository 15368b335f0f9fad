"""The sample filter, on stand-ins with the fields of the hosts' `Sample` that it touches."""

import enum
import logging
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.host.cli.loading import load_function
from mis_plugins import errors
from mis_plugins.errors import InputError
from mis_plugins.hosts.sample_filter import NAMED, fault_of

drop_broken_samples = load_function("mis_plugins.mis.drop_broken_samples", "--rollout-sample-filter-path")
ARGS = SimpleNamespace()


class Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    rollout_log_probs: Any = None
    response_length: int = 2
    loss_mask: Any = None
    remove_sample: bool = False
    index: int | None = 7
    group_index: int | None = 3
    status: Status = Status.COMPLETED
    metadata: Any = field(default_factory=dict)
    tokens: Any = (1, 2, 5, 6)
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None


def good(**changes: Any) -> Sample:
    return replace(Sample([-0.5, -1.0]), **changes)


def returned(*tokens: int | None) -> dict[str, list]:
    """A sample's metadata, with SGLang's entries for tokens that the engine sampled."""
    return {"output_token_logprobs": [None if x is None else [-0.5, x, None] for x in tokens]}


def nucleus(*kept: list[int]) -> dict[str, Any]:
    """What slime keeps of the tokens that each one was sampled from."""
    offsets = [sum(map(len, kept[:i])) for i in range(len(kept) + 1)]
    flat = torch.tensor(sum(kept, []), dtype=torch.int32)
    return {"rollout_top_p_token_ids": flat, "rollout_top_p_token_offsets": torch.tensor(offsets, dtype=torch.int32)}


BROKEN = {
    "missing": Sample(None),
    "empty": Sample([]),
    "too few": Sample([-0.5]),
    "too many": Sample([-0.5, -1.0, -2.0]),
    "some for nothing": Sample([-0.5], response_length=0),
    "NaN": Sample([-0.5, math.nan]),
    "impossible": Sample([-math.inf, -1.0]),
    "None inside": Sample([None, -1.0]),
    "NaN in a tensor": Sample(torch.tensor([math.nan, -1.0])),
    "too few in an array": Sample(numpy.array([-1.0])),
    "NaN beside a masked token": Sample([math.nan, -1.0], loss_mask=[1, 0]),
    "aborted half-way": Sample([-0.5], status=Status.ABORTED),
    "a loss mask that the host will refuse": Sample([-0.5, math.nan], loss_mask=[1]),
    "a loss mask too long": good(loss_mask=[1, 1, 1]),
    "a loss mask too short": good(loss_mask=torch.tensor([1])),
    "an empty loss mask": good(loss_mask=[]),
    "a response_length too small": good(response_length=1, loss_mask=[1, 1]),
    "three counts": good(response_length=4, loss_mask=[1, 1, 1]),
    "vLLM's stand-in": Sample([-9999.0, -1.0]),
    "a whole number": Sample([-9999, -1]),
    "in an array": Sample(numpy.array([-0.5, -9999.0], dtype=numpy.float32)),
    "in bfloat16": Sample(torch.tensor([-0.5, -9999.0], dtype=torch.bfloat16)),
    "in float16": Sample(torch.tensor([-0.5, -9999.0], dtype=torch.float16)),
    "SGLang's stand-in": Sample([torch.finfo(torch.float32).min, -1.0]),
    "everywhere": Sample([-1e9, -1e9]),
    "a text": Sample(["-0.5", -1.0]),
    "an entry of SGLang": Sample([[-0.5, 7, None], -1.0]),
    "read once": Sample(iter([-0.5, -1.0])),
    "a number for a list": Sample(-0.5),
    "several numbers for one": Sample([torch.zeros(2), torch.zeros(2)]),
    "a number beyond all floats": Sample([-(10**400), -1.0]),
    "several numbers for one in the loss mask": good(loss_mask=[torch.ones(2), numpy.ones(2)]),
    "missing, for a number of an array": good(rollout_log_probs=None, response_length=numpy.array(2)),
    "no response_length": good(response_length=None),
    "a text for a response_length": good(response_length="2"),
    "a share for a response_length": good(response_length=2.0),
    "a response_length below 0": good(response_length=-1),
    "a response_length that no list has": good(response_length=10**30),
    "a response_length that no memory holds": good(response_length=2**40),
    "a tensor with a share for a response_length": good(response_length=torch.tensor(2.5)),
    "NaN in the loss mask": good(loss_mask=[math.nan, 1]),
    "None in the loss mask": good(loss_mask=[1, None]),
    "a text in the loss mask": good(loss_mask=["1", 1]),
    "a loss mask below 0": good(loss_mask=torch.tensor([-1, 1])),
    "a number for a loss mask": good(loss_mask=1),
    "no token of a prompt": good(tokens=[5, 6]),
    "no tokens": good(tokens=[]),
    "fewer tokens than the response has": good(tokens=[7], loss_mask=[1, 1]),
    "None for tokens": good(tokens=None),
    "a loss mask that agrees with the response": Sample([-0.5], loss_mask=[1, 1]),
    "a response_length too large": good(response_length=3, loss_mask=[1, 0]),
    "above 0, as TRL's PPO pads": Sample([-0.5, 1.0]),
    "far above 0": Sample([1e9, -0.5]),
    "a truth value": Sample([True, -0.5]),
    "infinite": Sample([-0.5, math.inf]),
    "fewer tokens than the response has, without a loss mask": good(tokens=[7]),
    "NaN at the end of the loss mask": good(loss_mask=[1, math.nan]),
    # Tokens that an environment changed at equal length, so that every count fits, and the log-probs are of other text.
    "another token": good(metadata=returned(5, 7)),
    "in another order": good(metadata=returned(6, 5)),
    "beside a masked one": good(loss_mask=[0, 1], metadata=returned(5, 7)),
    "an entry too few": good(metadata=returned(5)),
    "an entry too many": good(metadata=returned(5, 6, 7)),
    "a number for entries": good(metadata={"output_token_logprobs": 2}),
    "outside its nucleus": good(**nucleus([5], [3, 7])),
    "in the other's nucleus": good(**nucleus([6], [5])),
    **{
        f"{other} beside {name}": good(tokens=[1, 2, 5, other], **more)
        for other in (None, "6", 6.5, 2**70)
        for name, more in {"entries": {"metadata": returned(5, 6)}, "sets": nucleus([5], [6])}.items()
    },
    **{f"{entry} for an entry of SGLang": good(metadata={"output_token_logprobs": [(-0.5, 5), entry]})
       for entry in ({"token": 5}, (-0.5,), (-0.5, None), 7)},
}  # fmt: skip
FINE = {
    "plain": good(),
    "a number of an array for a response_length": good(response_length=numpy.array(2)),
    "a number of a tensor for a response_length": good(response_length=torch.tensor([2])),
    "a tuple": Sample((-0.5, -1.0)),
    "a tensor": Sample(torch.tensor([-0.5, -1.0])),
    "an array": Sample(numpy.array([-0.5, -1.0])),
    "certain": Sample([0.0, -0.0]),
    "whole numbers": Sample([0, -1]),
    "numbers of an array": Sample([numpy.float32(-0.5), torch.tensor(-1.0)]),
    "unlikely": Sample([-104.0, -700.0]),
    "a stand-in at a masked token": Sample([-9999.0, -1.0], loss_mask=[0, 1]),
    "truncated": good(status=Status.TRUNCATED),
    "aborted, whole": good(status=Status.ABORTED),
    "no response": Sample([], response_length=0),
    "no response, never sampled": Sample(None, response_length=0, status=Status.ABORTED),
    "NaN at a masked token": Sample([math.nan, -1.0], loss_mask=[0, 1]),
    "None at a masked token": Sample([None, -1.0], loss_mask=torch.tensor([0, 1])),
    "no index": good(index=None, group_index=None),
    "truth values in the loss mask": good(loss_mask=[True, False]),
    "a part of a token in the loss mask": good(loss_mask=[0.5, 1.0]),
    "no response and no tokens": Sample(None, response_length=0, tokens=[]),
    "little above 0, by rounding": Sample([1e-3, -0.5]),
    "the engine's own": good(metadata=returned(5, 6)),
    "a tensor of them": good(tokens=torch.tensor([1, 2, 5, 6]), metadata=returned(5, 6)),
    "another one outside the loss": good(loss_mask=[0, 1], metadata=returned(4, 6)),
    "one that no engine sampled": good(metadata=returned(None, 6)),
    "no metadata": good(metadata=None),
    "whole numbers of an array of floats": good(tokens=numpy.array([1.0, 2, 5, 6]), metadata=returned(5, 6)),
    "a number for no entries": Sample([], response_length=0, metadata={"output_token_logprobs": 2}),
    "in its nucleus": good(**nucleus([5], [3, 6])),
    "a tool's, which has no nucleus": good(loss_mask=[0, 1], **nucleus([], [6])),
    "of a nucleus that slime refuses": good(**nucleus([5])),
    "of offsets that do not rise": good(
        rollout_top_p_token_ids=torch.tensor([5, 6]), rollout_top_p_token_offsets=torch.tensor([0, 3, 2])
    ),
    "no response, and no set": Sample([], response_length=0, metadata=returned(), **nucleus()),
    "no response, and no offset": Sample(
        [], response_length=0, rollout_top_p_token_ids=[], rollout_top_p_token_offsets=[]
    ),
    "metadata that is text": good(metadata="from the data set"),
}
OTHER_TOKEN = "1 of 2 response tokens are not those that the engine returned, the first at 1"
# What the fault of a broken sample says, where log-probs, tokens and loss mask disagree: which of them is wrong.
DETAILS = {
    "a loss mask too long": "a loss mask of 3 for 2 response tokens and 2 rollout log-probs",
    "an empty loss mask": "a loss mask of 0 for 2 response tokens and 2 rollout log-probs",
    "a loss mask that agrees with the response": "1 rollout log-probs for 2 response tokens and a loss mask of 2",
    "a response_length too large": "a response_length of 3 for 2 rollout log-probs and a loss mask of 2",
    "three counts": "2 rollout log-probs for 4 response tokens and a loss mask of 3: no two agree",
    "above 0, as TRL's PPO pads": "1 of 2 rollout log-probs absent: 1 in 1",
    "far above 0": "1 of 2 rollout log-probs absent: 1e+09 in 1",
    "a truth value": "1 of 2 rollout log-probs not finite",
    "infinite": "1 of 2 rollout log-probs not finite",
    "fewer tokens than the response has, without a loss mask": "1 tokens for a prompt and 2 response tokens",
    "no token of a prompt": "2 tokens for a prompt and 2 response tokens",
    "no response_length": "a response_length of None, which is no number of tokens",
    "NaN at the end of the loss mask": "a loss mask with nan, where a number from 0 on should be",
    **{name: OTHER_TOKEN for name in BROKEN if name.endswith("for an entry of SGLang")},
}
SAMPLES = {**BROKEN, **FINE}


@pytest.mark.parametrize("case", SAMPLES)
def test_broken_samples_alone_are_dropped_and_all_can_be_sliced_and_converted(case: str):
    """The hosts assert the count of dropped samples too, and make tensors of them."""
    sample = replace(SAMPLES[case])
    drop_broken_samples(ARGS, [[good(), sample]])
    assert sample.remove_sample == (case in BROKEN)
    assert type(sample.response_length) is int
    assert len(sample.rollout_log_probs) == sample.response_length
    assert torch.isfinite(torch.as_tensor(sample.rollout_log_probs)).all()
    assert not any(x < -746 for x in sample.rollout_log_probs)
    assert sample.loss_mask is None or len(sample.loss_mask) == sample.response_length
    assert sample.loss_mask is None or (torch.as_tensor(sample.loss_mask) >= 0).all()
    assert not sample.response_length or len(sample.tokens) > sample.response_length


@pytest.mark.parametrize("case", DETAILS)
def test_the_fault_names_what_is_wrong_with_a_sample(case: str):
    fault = fault_of(replace(BROKEN[case]))
    assert fault is not None and fault.detail == DETAILS[case]
    assert (fault.cause == "of other tokens") == (DETAILS[case] == OTHER_TOKEN)


def test_log_probs_that_fit_are_not_touched():
    values = [[-0.5, -1.0], torch.tensor([-0.5, -1.0]), numpy.array([-0.5, -1.0])]
    samples = [Sample(value) for value in values]
    drop_broken_samples(ARGS, [samples])
    assert all(sample.rollout_log_probs is value for sample, value in zip(samples, values, strict=True))


def test_only_what_is_outside_the_loss_is_replaced():
    sample = Sample([math.nan, -1.0, None], response_length=3, loss_mask=[0, 1, 0])
    drop_broken_samples(ARGS, [[sample]])
    assert sample.rollout_log_probs == [0.0, -1.0, 0.0]


@pytest.mark.parametrize(
    "nest",
    [
        lambda a, b: [a, b],
        lambda a, b: [[a, b]],
        lambda a, b: [[a], [b]],
        lambda a, b: [[[a], [b]]],
        lambda a, b: [[], [[a, None], (b,)], None],
        lambda a, b: iter([a, [b]]),
    ],
)
def test_samples_are_found_in_whatever_lists(nest: Any):
    """Groups of samples; of lists of samples, when one prompt makes several; slime's documentation says flat."""
    drop_broken_samples(ARGS, [])
    drop_broken_samples(ARGS, [[]])
    first, second = good(), Sample([-0.5])
    drop_broken_samples(ARGS, nest(first, second))
    assert (first.remove_sample, second.remove_sample) == (False, True)


def test_a_sample_removed_earlier_stays_removed_and_is_not_named(caplog: pytest.LogCaptureFixture):
    sample = Sample([-0.5], remove_sample=True)
    drop_broken_samples(ARGS, [[sample, good()]])
    assert sample.remove_sample and sample.rollout_log_probs == [0.0, 0.0]
    assert not caplog.records


def test_many_dropped_samples_end_in_a_total(caplog: pytest.LogCaptureFixture):
    drop_broken_samples(ARGS, [[good()], [Sample(None, index=index) for index in range(50)]])
    assert len(caplog.records) == NAMED + 1
    assert "dropped 50 of 51 samples" in caplog.records[-1].getMessage()
    assert f"missing in 50; the first {NAMED} are named" in caplog.records[-1].getMessage()


def test_an_engine_that_returns_no_log_probs_is_an_error():
    """A sample removed earlier does not hide it."""
    empty, removed = Sample(None, response_length=0), Sample(None, remove_sample=True)
    for data, count in (([[Sample(None), Sample([])], [Sample(None), empty]], 3), ([[removed, Sample(None)]], 1)):
        with pytest.raises(InputError, match=f"none of {count} samples has any.*return_logprob"):
            drop_broken_samples(ARGS, data)


def test_all_broken_in_other_ways_is_not():
    samples = [Sample(None), Sample([math.nan, math.nan])]
    drop_broken_samples(ARGS, [samples])
    assert all(sample.remove_sample for sample in samples)


@pytest.mark.parametrize("made", [SimpleNamespace, dict])
def test_what_miles_scores_again_is_left_alone(made: type, caplog: pytest.LogCaptureFixture):
    """--recompute-logprobs-via-prefill runs after this hook, but not for aborted samples."""
    errors.warn_once.cache_clear()
    args = made(recompute_logprobs_via_prefill=True)
    later, aborted = Sample(None), Sample([-0.5], status=Status.ABORTED)
    drop_broken_samples(args, [[later, aborted, good()]])
    assert not later.remove_sample and later.rollout_log_probs is None
    assert aborted.remove_sample
    assert "aborted samples only" in caplog.text


missing = st.sampled_from([math.nan, math.inf, -math.inf, -9999, -1e9])
numbers = st.one_of(st.none(), st.floats(-5, 0), missing)


@given(st.lists(numbers, max_size=6), st.integers(0, 5), st.data())
def test_the_three_faults(log_probs: list, length: int, data: st.DataObject):
    """Against the three sentences of the contract, for any list, count and mask."""
    mask = data.draw(st.none() | st.lists(st.integers(0, 1), min_size=length, max_size=length))
    fault = fault_of(Sample(log_probs, response_length=length, loss_mask=mask, tokens=range(9)))
    if length and not log_probs:
        assert fault and fault.cause == "missing"
    elif len(log_probs) != length:
        assert fault and fault.cause == "of another count"
    else:
        valid = [x for x, counts in zip(log_probs, mask or [1] * length, strict=True) if counts]
        broken = [x for x in valid if x is None or not -746 < x < math.inf]
        assert (fault is not None) == bool(broken)
        if fault:
            stands_in = any(x in (-9999, -1e9) for x in broken)
            assert fault.cause == ("absent" if stands_in else "not finite")
            assert fault.detail.startswith(f"{len(broken)} of {length} ")


def test_a_drafted_token_may_lie_outside_its_nucleus():
    """slime's engine accepts some from there, and keeps them in the sum that it renormalizes by."""
    sample, changed = (replace(BROKEN[case]) for case in ("outside its nucleus", "another token"))
    drop_broken_samples(SimpleNamespace(sglang_speculative_algorithm="EAGLE"), [[sample, changed]])
    assert (sample.remove_sample, changed.remove_sample) == (False, True)


# The samples, and what the log says of them.
LOGGED: list[tuple[list[Sample], list[str]]] = [
    ([good(), Sample([-0.5], index=11, group_index=2), Sample([math.nan, -1.0], index=12)], [
        "dropped sample 11 of group 2: 1 rollout log-probs for 2 response tokens",
        "dropped sample 12 of group 3: 1 of 2 rollout log-probs not finite",
        "dropped 2 of 3 samples from the loss: rollout log-probs of another count in 1, not finite in 1",
    ]),
    ([good(), Sample([-9999.0, None, -9999, math.nan, -1e9, "x"], response_length=6, index=1),
      Sample([None, -1.0], index=2)], [
        "dropped sample 1 of group 3: 6 of 6 rollout log-probs absent: -9999 in 2, None in 1, -1e+09 in 1, 'x' in 1",
        "dropped sample 2 of group 3: 1 of 2 rollout log-probs not finite: None in 1",
        "dropped 2 of 3 samples from the loss: rollout log-probs absent in 1, not finite in 1",
    ]),
    ([good(metadata=returned(5, 7)), good(metadata=returned(5))], [
        "dropped sample 7 of group 3: 1 of 2 response tokens are not those that the engine returned, the first at 1",
        "dropped sample 7 of group 3: 1 output_token_logprobs for 2 response tokens",
        "dropped 2 of 2 samples from the loss: rollout log-probs of other tokens in 2",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("samples", "said"), LOGGED)
def test_the_log_names_samples_and_what_is_wrong_with_them(
    samples: list[Sample], said: list[str], caplog: pytest.LogCaptureFixture
):
    drop_broken_samples(ARGS, [samples[:1], samples[1:]])
    assert [record.getMessage() for record in caplog.records] == said
    assert all(record.levelno == logging.WARNING for record in caplog.records)
