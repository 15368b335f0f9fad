"""Whole responses are cut over context-parallel ranks as the hosts cut them, and joined again."""

from typing import cast

import pytest
import torch
from launch import run_ranks
from megatron.core import parallel_state as mpu
from oracle import zigzag as owned
from torch.distributed import ProcessGroup

from mis_plugins.packing.exchange import gathered
from mis_plugins.packing.layout import whole, zigzag

RESPONSES = [5, 1, 9, 3, 0]
TOTALS = [12, 2, 10, 40, 6]  # the fourth response lies on one of two ranks alone
PADDED = [40, 40, 40, 40, 40]
ROWS = [100.0 * i + torch.arange(length) for i, length in enumerate(RESPONSES)]
KINDS = (torch.float32, torch.int64, torch.bfloat16)


def cut_and_joined(rank: int) -> list:
    """What this rank cuts from whole responses, and what it joins from its own tokens and the other rank's."""
    group, found = cast(ProcessGroup, mpu.get_context_parallel_group()), []
    for padded in (None, PADDED):
        layout = zigzag(TOTALS, RESPONSES, 2, rank, padded)
        for kind in KINDS:
            mine = layout.cut([row.to(kind) for row in ROWS])
            found.append((padded, kind, mine, list(gathered(layout, mine, group))))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list:
    return run_ranks(2, 2, cut_and_joined, tmp_path_factory.mktemp("ranks"))


def test_a_rank_cuts_the_tokens_that_the_host_leaves_it(ranks: list):
    for rank, found in enumerate(ranks):
        for padded, kind, mine, _ in found:
            for i, row in enumerate(ROWS):
                kept = owned(TOTALS[i], RESPONSES[i], 2, rank, None if padded is None else padded[i])
                assert mine[i].dtype == kind and mine[i].tolist() == row.to(kind)[kept].tolist()


def test_every_rank_joins_the_whole_responses(ranks: list):
    for found in ranks:
        for _, kind, _, joined in found:
            assert [row.tolist() for row in joined] == [row.to(kind).tolist() for row in ROWS]
            assert all(row.dtype == kind for row in joined)


def test_a_rank_may_hold_nothing_of_a_response(ranks: list):
    assert [len(mine[3]) for _, _, mine, _ in (found[0] for found in ranks)] == [3, 0]


def test_one_rank_keeps_whole_responses():
    layout = whole(RESPONSES)
    assert all(torch.equal(*pair) for pair in zip(layout.cut(ROWS), ROWS, strict=True))
    assert gathered(layout, ROWS, None) is ROWS
