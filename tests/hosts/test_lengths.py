"""Lists of a micro-batch that do not fit: the error names the odd one of the three lists, and all counts."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import host_args
from drive import one_rank
from torch import Tensor

from mis_plugins import mis
from mis_plugins.errors import InputError
from mis_plugins.hosts.batch import check_lengths
from mis_plugins.packing.layout import whole, zigzag

Counts = Sequence[int | None]
MASK, TRAIN, ROLLOUT = "loss_masks", "train_log_probs", "rollout_log_probs"


def of(counts: Counts) -> list[Tensor | None]:
    return [None if count is None else torch.full((count,), -1.0) for count in counts]


def lists(mask: Counts, train: Counts, rollout: Counts) -> dict[str, Any]:
    return dict(zip((MASK, TRAIN, ROLLOUT), map(of, (mask, train, rollout)), strict=True))


CASES = [
    ([6, 3], [5, 3], [5, 3], "loss_masks[0]: 6 tokens, but sequence 0 has 5"),
    ([4, 3], [5, 3], [5, 3], "loss_masks[0]: 4 tokens, but sequence 0 has 5"),
    ([5, 0], [5, 3], [5, 3], "loss_masks[1]: 0 tokens, but sequence 1 has 3"),
    ([5, 3], [5, 4], [5, 3], "train_log_probs[1]: 4 tokens, but sequence 1 has 3"),
    ([5, 3], [0, 3], [5, 3], "train_log_probs[0]: 0 tokens, but sequence 0 has 5"),
    ([5, 3], [5, 3], [4, 3], "rollout_log_probs[0]: 4 tokens, but sequence 0 has 5"),
    ([5, 3], [5, 3], [5, 0], "rollout_log_probs[1]: 0 tokens, but sequence 1 has 3"),
    ([5, 3], [5, 3], [3, 5], "rollout_log_probs[0]: 3 tokens, but sequence 0 has 5"),
    ([3, 5], [5, 3], [5, 3], "loss_masks[0]: 3 tokens, but sequence 0 has 5"),
    ([6, 3], [5, 3], [4, 3], f"{MASK}, {TRAIN}, {ROLLOUT}: no two agree on the tokens of sequence 0"),
    ([5, 3], [5, None], [5, 3], "train_log_probs[1]: None; sequence 1 came without train log probs"),
    ([5, 3], [5, 3], [5, None], "rollout_log_probs[1]: None; sequence 1 came without rollout log probs"),
]  # fmt: skip


def assert_told(error: str, message: str, here: Sequence[tuple[str, int | None]]) -> None:
    """The error begins with the list that is wrong, and has all counts of the sequence."""
    assert error.startswith(message)
    assert "None" in message or all(f"{name} {count}" in error for name, count in here), error


@pytest.mark.parametrize("hook", ["compute_mis_weights", "compute_mis_weights_with_cp", "compute_mis_weights_fsdp"])
@pytest.mark.parametrize("response_lengths", [[5, 3], [6, 4]])
@pytest.mark.parametrize(("mask", "train", "rollout", "message"), CASES)
def test_lists_with_and_without_a_host_whatever_the_lengths_it_states(
    mask: Counts, train: Counts, rollout: Counts, message: str, response_lengths: list[int], hook: str
):
    given = lists(mask, train, rollout)
    if hook != "compute_mis_weights":  # which is told no lengths
        given |= {"response_lengths": response_lengths, "total_lengths": [n + 3 for n in response_lengths]}
        given |= {"pg_loss": torch.ones(8), "parallel_state": one_rank()}
        if response_lengths == [6, 4] and mask[0] == train[0] == rollout[0] and "None" not in message:
            message = "response_lengths[0]: 6 tokens, but sequence 0 has 5"
    with pytest.raises(InputError) as caught:
        getattr(mis, hook)(host_args(mis={"weight": {}}), **given)
    if message.startswith("response_lengths"):
        assert str(caught.value).startswith(message)
    else:
        i = int(re.findall(r"sequence (\d)", message)[0])
        assert_told(str(caught.value), message, [(MASK, mask[i]), (TRAIN, train[i]), (ROLLOUT, rollout[i])])


def test_a_sequence_without_a_loss_mask_and_lengths_that_alone_are_wrong():
    lists = {TRAIN: of([5, 3]), ROLLOUT: of([5, 3])}
    with pytest.raises(InputError, match=r"^loss_masks\[0\]: None; sequence 0 came without loss masks"):
        check_lengths(of([None, 3]), lists, whole([5, 3]))
    with pytest.raises(InputError, match=r"^response_lengths\[1\]: 4 tokens, but sequence 1 has 3 \(loss_masks 3, tr"):
        check_lengths(of([5, 3]), lists, whole([5, 4]))


@pytest.mark.parametrize(("mask", "rollout", "name"), [(6, 5, MASK), (5, 4, ROLLOUT)])
def test_of_two_lists_the_stated_lengths_decide(mask: int, rollout: int, name: str):
    with pytest.raises(InputError, match=rf"^{name}\[0\]: .* sequence 0 has 5 "):
        check_lengths(of([mask]), {ROLLOUT: of([rollout])}, whole([5]))


def test_swapped_sequences_are_told():
    with pytest.raises(InputError, match="it has the lengths of all sequences in another order"):
        check_lengths(of([5, 3]), {TRAIN: of([5, 3]), ROLLOUT: of([3, 5])}, whole([5, 3]))
    with pytest.raises(InputError) as caught:
        check_lengths(of([5, 3]), {TRAIN: of([5, 3]), ROLLOUT: of([3, 4])}, whole([5, 3]))
    assert "order" not in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("padded", [None, [16, 16]])
@pytest.mark.parametrize("name", [MASK, TRAIN, ROLLOUT])
@pytest.mark.parametrize("more", [1, -1])
def test_pieces_of_context_parallel_ranks(name: str, more: int, rank: int, padded: list[int] | None):
    """Log-probs are this rank's piece, and the mask is of the full response."""
    layout = zigzag([12, 9], [9, 7], 2, rank, padded)
    counts: dict[str, list[int]] = {MASK: [9, 7], TRAIN: layout.local_lengths, ROLLOUT: layout.local_lengths}
    check_lengths(of(counts[MASK]), {TRAIN: of(counts[TRAIN]), ROLLOUT: of(counts[ROLLOUT])}, layout)
    right, wrong = counts[name][1], counts[name][1] + more
    changed = {**counts, name: [counts[name][0], wrong]}
    told = rf"^{name}\[1\]: {wrong} tokens, but sequence 1 has {right} \(.*response_lengths 7, of which"
    with pytest.raises(InputError, match=told):
        check_lengths(of(changed[MASK]), {x: of(changed[x]) for x in (TRAIN, ROLLOUT)}, layout)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stated_length_that_no_list_has_is_named_under_context_parallelism(rank: int):
    true, stated = (zigzag([12], [length], 2, rank) for length in (9, 11))
    held = {name: of(true.local_lengths) for name in (TRAIN, ROLLOUT)}
    with pytest.raises(InputError, match=r"response_lengths\[0\]") as caught:
        check_lengths(of([9]), held, stated)
    assert true.local_lengths == stated.local_lengths or str(caught.value).startswith("response_lengths[0]: 11 tokens")
    assert "another order" not in str(caught.value)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("more", [2, -4])
def test_a_length_that_the_host_did_not_cut_by_is_named(more: int, padded: bool):
    """Loss mask and response_lengths agree, and so do the pieces of both sides."""
    held = of(zigzag([13], [9], 2, 0, [16] if padded else None).local_lengths)
    total, pad = (13, 16 + more) if padded else (13 + more, None)
    layout = zigzag([total], [9], 2, 0, None if pad is None else [pad])
    assert layout.local_lengths != [len(x) for x in held if x is not None]
    with pytest.raises(InputError, match=r"^total_lengths\[0\] \(max_seq_lens\[0\] with bshd\): .*loss_masks 9"):
        check_lengths(of([9]), {TRAIN: held, ROLLOUT: held}, layout)


def test_log_probs_that_the_host_did_not_cut_are_named():
    whole_response = {TRAIN: of([9]), ROLLOUT: of([9])}
    with pytest.raises(InputError, match=r"^train_log_probs, rollout_log_probs: the whole response of sequence 0"):
        check_lengths(of([9]), whole_response, zigzag([12], [9], 2, 0))


LENGTHS = {"total_lengths": [8, 6], "response_lengths": [5, 3], "max_seq_lens": [8, 8]}
NUMBERS = ["total_lengths", "response_lengths", MASK, TRAIN, ROLLOUT, "max_seq_lens"]


@pytest.mark.parametrize("more", [1, -1])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("hook", ["compute_mis_weights", "compute_mis_weights_with_cp", "compute_mis_weights_fsdp"])
def test_a_list_of_more_or_fewer_sequences_is_named(hook: str, name: str, more: int):
    given = lists([5, 3], [5, 3], [5, 3])
    if hook == "compute_mis_weights_with_cp":
        given |= LENGTHS
    if hook != "compute_mis_weights":
        given |= {"pg_loss": torch.ones(8), "parallel_state": one_rank()}
    if name not in given:
        return
    given[name] = [*given[name], *given[name]][: 2 + more]
    with pytest.raises(InputError, match=rf"^{name}: {2 + more} sequences, but the batch has 2 \(") as caught:
        getattr(mis, hook)(host_args(mis={"weight": {}}, qkv_format="bshd"), **given)
    assert all(f"{other} " in str(caught.value) for other in (MASK, name))


def test_several_lists_of_fewer_sequences_are_named():
    given = lists([5, 3], [5], [5]) | LENGTHS | {"pg_loss": torch.ones(5), "parallel_state": one_rank()}
    with pytest.raises(InputError, match=r"^train_log_probs, rollout_log_probs: 1 sequences, but the batch has 2 "):
        mis.compute_mis_weights_with_cp(host_args(mis={"weight": {}}), **given)
    with pytest.raises(InputError, match=r"^loss_masks, train_log_probs, rollout_log_probs: no two agree on the numb"):
        mis.compute_mis_weights(host_args(mis={"weight": {}}), **lists([5, 3], [5], [5, 3, 4]))


@pytest.mark.parametrize("length", [None, "8", (8,)])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_that_is_no_number_is_named(name: str, length: Any):
    given = lists([5, 3], [5, 3], [5, 3]) | LENGTHS | {"pg_loss": torch.ones(8), "parallel_state": one_rank()}
    given[name] = [LENGTHS[name][0], length]
    with pytest.raises(InputError, match=rf"^{name}\[1\]: got .*; expected a number of tokens"):
        mis.compute_mis_weights_with_cp(host_args(mis={"weight": {}}, qkv_format="bshd"), **given)


@pytest.mark.parametrize("name", [MASK, TRAIN, ROLLOUT])
def test_a_list_on_another_device_is_named(name: str):
    given = lists([5, 3], [5, 3], [5, 3])
    given[name] = [x.to("meta") for x in given[name]]
    with pytest.raises(InputError, match=rf"^{name}\[0\]: on meta, and the other lists are on cpu; move all lists of"):
        mis.compute_mis_weights(host_args(mis={"weight": {}}), **given)


@pytest.mark.parametrize(("total", "stated", "told"), [
    (6, 6, r"^response_lengths\[1\]: 6 tokens, but sequence 1 has 5 "),
    (5, 5, r"^total_lengths\[1\]: 5, but sequence 1 has a prompt and 5 response tokens"),
])  # fmt: skip
def test_a_response_that_is_as_long_as_its_sequence(total: int, stated: int, told: str):
    """The prompt has one token; a response_length that is one too large leaves no prompt."""
    given = lists([5, 5], [5, 5], [5, 5]) | {"pg_loss": torch.ones(10), "parallel_state": one_rank()}
    given |= {"total_lengths": [8, total], "response_lengths": [5, stated]}
    with pytest.raises(InputError, match=told):
        mis.compute_mis_weights_with_cp(host_args(mis={"weight": {}}), **given)


def test_the_rollout_hook_names_the_hosts_own_list():
    data = {"log_probs": of([4]), "rollout_log_probs": of([5]), "loss_masks": of([5])}
    data |= {"total_lengths": [8], "response_lengths": [5]}
    args = host_args(mis={"weight": {"normalize": {"scope": "rollout"}}})
    with pytest.raises(InputError, match=r"^log_probs\[0\]: 4 tokens, but sequence 0 has 5 "):
        mis.normalize_rollout(SimpleNamespace(**vars(args)), 0, data)
