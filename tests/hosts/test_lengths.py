"""Lists of a micro-batch that do not fit: the error names the sequence and all counts, before any work."""

from __future__ import annotations

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
FITS: dict[str, Counts] = {MASK: [5, 3], TRAIN: [5, 3], ROLLOUT: [5, 3]}
HOOKS = ("compute_mis_weights", "compute_mis_weights_with_cp", "compute_mis_weights_fsdp")


def of(counts: Counts) -> list[Tensor | None]:
    return [None if count is None else torch.full((count,), -1.0) for count in counts]


def lists(changed: dict[str, Counts]) -> dict[str, Any]:
    return {name: of(counts) for name, counts in (FITS | changed).items()}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({MASK: [6, 3]}, "sequence 0 has loss_masks 6, train_log_probs 5, rollout_log_probs 5 tokens"),
        ({MASK: [5, 0]}, "sequence 1 has loss_masks 0, train_log_probs 3"),
        ({TRAIN: [5, 4]}, "sequence 1 has loss_masks 3, train_log_probs 4, rollout_log_probs 3 tokens, and"),
        ({ROLLOUT: [3, 5]}, "sequence 0 has loss_masks 5, train_log_probs 5, rollout_log_probs 3 tokens, and"),
        ({TRAIN: [5, None]}, r"train_log_probs\[1\]: None; sequence 1 came without train log probs"),
        ({ROLLOUT: [5, None]}, r"rollout_log_probs\[1\]: None; sequence 1 came without rollout log probs"),
        ({ROLLOUT: [5, 3, 2]}, "rollout_log_probs: 3 sequences, but the batch has 2"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit(changed: dict[str, Counts], said: str, hook: str):
    given, args = lists(changed), host_args(mis={"weight": {}})
    if hook != HOOKS[0]:
        given |= {"response_lengths": [5, 3], "total_lengths": [8, 6], "pg_loss": torch.ones(8)}
        given["parallel_state"] = one_rank()
    with pytest.raises(InputError, match=f"^{said}"):
        getattr(mis, hook)(args, **given)


def test_lengths_that_alone_are_wrong_and_a_sequence_without_a_loss_mask():
    sides = {TRAIN: of([5, 3]), ROLLOUT: of([5, 3])}
    with pytest.raises(InputError, match="rollout_log_probs 3 tokens, and response_lengths 4$"):
        check_lengths(of([5, 3]), sides, whole([5, 4]))
    with pytest.raises(InputError, match=r"^loss_masks\[0\]: None; sequence 0 came without loss masks"):
        check_lengths(of([None, 3]), sides, whole([5, 3]))


@pytest.mark.parametrize(("count", "hinted"), [(4, True), (5, False)])
def test_a_response_that_may_be_cut_is_told_the_other_hook(count: int, hinted: bool):
    given = lists({TRAIN: [count, 3], ROLLOUT: [4, 3]}) | {"pg_loss": torch.ones(7)}
    with pytest.raises(InputError) as caught:
        mis.compute_mis_weights_fsdp(host_args(mis={"weight": {}}), **given)
    assert ("if context parallelism splits the responses, use --custom-tis" in str(caught.value)) == hinted


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("padded", [None, [16, 16]])
@pytest.mark.parametrize("name", [MASK, TRAIN, ROLLOUT])
@pytest.mark.parametrize("more", [1, -1])
def test_pieces_of_context_parallel_ranks(name: str, more: int, rank: int, padded: list[int] | None):
    """Log-probs are this rank's piece, and the mask is of the full response."""
    layout = zigzag([12, 9], [9, 7], 2, rank, padded)
    counts: dict[str, list[int]] = {MASK: [9, 7], TRAIN: layout.local_lengths, ROLLOUT: layout.local_lengths}
    check_lengths(of(counts[MASK]), {x: of(counts[x]) for x in (TRAIN, ROLLOUT)}, layout)
    wrong, local = counts[name][1] + more, layout.local_lengths[1]
    changed = {**counts, name: [counts[name][0], wrong]}
    said = f"^sequence 1 has .*{name} {wrong}.* and response_lengths 7, of which {local} on this rank"
    with pytest.raises(InputError, match=said):
        check_lengths(of(changed[MASK]), {x: of(changed[x]) for x in (TRAIN, ROLLOUT)}, layout)


def test_the_rollout_hook_names_the_hosts_own_list():
    data = {"log_probs": of([4]), "rollout_log_probs": of([5]), "loss_masks": of([5])}
    data |= {"total_lengths": [8], "response_lengths": [5]}
    args = host_args(mis={"weight": {"normalize": {"scope": "rollout"}}})
    with pytest.raises(InputError, match="^sequence 0 has loss_masks 5, log_probs 4, rollout_log_probs 5"):
        mis.normalize_rollout(SimpleNamespace(**vars(args)), 0, data)
