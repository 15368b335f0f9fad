"""Lists of a micro-batch that do not fit: the error names the odd one of the three lists, and all counts."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import host_args
from drive import one_rank
from torch import Tensor

from mis_plugins import mis
from mis_plugins.errors import InputError
from mis_plugins.hosts.batch import check_lengths, host_layout
from mis_plugins.packing.layout import Layout, whole, zigzag

Counts = Sequence[int | None]
LISTS = MASK, TRAIN, ROLLOUT = "loss_masks", "train_log_probs", "rollout_log_probs"
LENGTHS = {"total_lengths": [8, 6], "response_lengths": [5, 3], "max_seq_lens": [8, 8]}
HOOKS = {"compute_mis_weights": LISTS, "compute_mis_weights_fsdp": LISTS,
         "compute_mis_weights_with_cp": (*LENGTHS, *LISTS)}  # fmt: skip


def of(counts: Counts) -> list[Tensor | None]:
    return [None if count is None else torch.full((count,), -1.0) for count in counts]


def handed(*counts: Counts, **stated: Sequence[Any]) -> dict[str, Any]:
    """Three lists, and what a host hands with them where it states lengths."""
    alone = {"pg_loss": torch.ones(sum(stated["response_lengths"])), "parallel_state": one_rank()} if stated else {}
    return {**dict(zip(LISTS, map(of, counts), strict=True)), **alone, **stated}


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


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("response_lengths", [[5, 3], [6, 4]])
@pytest.mark.parametrize(("mask", "train", "rollout", "message"), CASES)
def test_lists_with_and_without_a_host_whatever_the_lengths_it_states(
    mask: Counts, train: Counts, rollout: Counts, message: str, response_lengths: list[int], hook: str
):
    """The error begins with the list that is wrong, and has all counts of the sequence."""
    given = handed(mask, train, rollout)
    if hook != "compute_mis_weights":  # which is told no lengths
        given |= {"response_lengths": response_lengths, "total_lengths": [n + 3 for n in response_lengths]}
        given |= {"pg_loss": torch.ones(8), "parallel_state": one_rank()}
        if response_lengths == [6, 4] and mask[0] == train[0] == rollout[0] and "None" not in message:
            message = "response_lengths[0]: 6 tokens, but sequence 0 has 5"
    with pytest.raises(InputError) as caught:
        getattr(mis, hook)(host_args(mis={"weight": {}}), **given)
    error, i = str(caught.value), int(re.findall(r"sequence (\d)", message)[0])
    counts = [(MASK, mask[i]), (TRAIN, train[i]), (ROLLOUT, rollout[i])]
    assert error.startswith(message)
    assert "None" in message or all(f"{name} {count}" in error for name, count in counts), error


# Counts of the loss mask and of each side's log-probs, what the host states, and the error.
SWAPPED = "it has the lengths of all sequences in another order"
STATED: list[tuple[Counts, Counts | None, Counts, Layout, str]] = [
    ([None, 3], [5, 3], [5, 3], whole([5, 3]), r"loss_masks\[0\]: None; sequence 0 came without loss masks"),
    ([5, 3], [5, 3], [5, 3], whole([5, 4]),
     r"response_lengths\[1\]: 4 tokens, but sequence 1 has 3 \(loss_masks 3, tr"),
    ([6], None, [5], whole([5]), r"loss_masks\[0\]: .* sequence 0 has 5 "),
    ([5], None, [4], whole([5]), r"rollout_log_probs\[0\]: .* sequence 0 has 5 "),
    ([5, 3], [5, 3], [3, 5], whole([5, 3]), f".*{SWAPPED}"),
    ([5, 3], [5, 3], [3, 4], whole([5, 3]), f"(?!.*{SWAPPED})"),
    ([9], [9], [9], zigzag([12], [9], 2, 0), "train_log_probs, rollout_log_probs: the whole response of sequence 0"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "train", "rollout", "layout", "said"), STATED)
def test_the_lengths_that_the_host_states_tell_which_list_is_wrong(
    mask: Counts, train: Counts | None, rollout: Counts, layout: Layout, said: str
):
    given = {name: of(counts) for name, counts in ((TRAIN, train), (ROLLOUT, rollout)) if counts}
    with pytest.raises(InputError, match=f"^{said}"):
        check_lengths(of(mask), given, layout)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("padded", [None, [16, 16]])
@pytest.mark.parametrize("name", LISTS)
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


@pytest.mark.parametrize("more", [1, -1])
@pytest.mark.parametrize(("hook", "name"), [(hook, name) for hook, names in HOOKS.items() for name in names])
def test_a_list_of_more_or_fewer_sequences_is_named(hook: str, name: str, more: int):
    given = handed([5, 3], [5, 3], [5, 3])
    if hook == "compute_mis_weights_with_cp":
        given |= LENGTHS
    if hook != "compute_mis_weights":
        given |= {"pg_loss": torch.ones(8), "parallel_state": one_rank()}
    given[name] = [*given[name], *given[name]][: 2 + more]
    with pytest.raises(InputError, match=rf"^{name}: {2 + more} sequences, but the batch has 2 \(") as caught:
        getattr(mis, hook)(host_args(mis={"weight": {}}, qkv_format="bshd"), **given)
    assert all(f"{other} " in str(caught.value) for other in (MASK, name))


FIT = [[5, 3]] * 3
PROMPTLESS = "sequence 1 has a prompt and 5 response tokens"
WRONG = [
    (handed([5, 3], [5], [5], **LENGTHS), r"train_log_probs, rollout_log_probs: 1 sequences, but the batch has 2 "),
    (handed([5, 3], [5], [5, 3, 4]), "loss_masks, train_log_probs, rollout_log_probs: no two agree on the numb"),
    *((handed(*FIT, **LENGTHS) | {name: [LENGTHS[name][0], length]},
       rf"{name}\[1\]: got .*; expected a whole number of tokens")
      for name in LENGTHS for length in (None, "8", (8,), 8.0, torch.tensor(8.0))),
    *((handed(*FIT) | {name: [torch.ones(n, device="meta") for n in (5, 3)]},
       rf"{name}\[0\]: on meta, and the other lists are on cpu; move all lists of") for name in LISTS),
    # The prompt has one token; a response_length that is one too large leaves no prompt.
    (handed(*[[5, 5]] * 3, total_lengths=[8, 6], response_lengths=[5, 6]),
     r"response_lengths\[1\]: 6 tokens, but sequence 1 has 5 "),
    (handed(*[[5, 5]] * 3, total_lengths=[8, 5], response_lengths=[5, 5]), rf"total_lengths\[1\]: 5, but {PROMPTLESS}"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_lists_and_lengths_that_no_batch_has_are_named(given: dict[str, Any], said: str):
    hook = mis.compute_mis_weights_with_cp if "pg_loss" in given else mis.compute_mis_weights
    qkv_format = "bshd" if "max_seq_lens" in given else "thd"
    with pytest.raises(InputError, match=f"^{said}"):
        hook(host_args(mis={"weight": {}}, qkv_format=qkv_format), **given)


def test_lengths_in_floats_are_named_where_a_host_hands_no_others():
    given = handed(*FIT, response_lengths=[5, 3]) | {"response_lengths": [5, 3.0]}
    with pytest.raises(InputError, match=r"^response_lengths\[1\]: got 3\.0; expected a whole number of tokens"):
        mis.compute_mis_weights_fsdp(host_args(mis={"weight": {}}), **given)


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int8, torch.tensor])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_lengths_of_any_whole_number_are_cut_alike(qkv_format: str, kind: Callable[[int], Any]):
    """Unsigned numbers wrap around below 0, and 8 bits hold no sum of three lengths."""
    args, stated = SimpleNamespace(qkv_format=qkv_format), ([120, 90], [100, 60], [124, 124])
    totals, responses, padded = ([kind(length) for length in each] for each in stated)
    for rank in range(2):
        layout = host_layout(args, totals, responses, padded, 2, rank)
        assert layout == zigzag(*stated[:2], 2, rank, stated[2] if qkv_format == "bshd" else None)


def test_the_rollout_hook_names_the_hosts_own_list():
    data = {"log_probs": of([4]), "rollout_log_probs": of([5]), "loss_masks": of([5])}
    data |= {"total_lengths": [8], "response_lengths": [5]}
    args = host_args(mis={"weight": {"normalize": {"scope": "rollout"}}})
    with pytest.raises(InputError, match=r"^log_probs\[0\]: 4 tokens, but sequence 0 has 5 "):
        mis.normalize_rollout(SimpleNamespace(**vars(args)), 0, data)
