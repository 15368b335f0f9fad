"""Whole responses are cut over context-parallel ranks as the hosts cut them, joined again, and added up."""

from typing import cast

import pytest
import torch
from launch import run_ranks
from megatron.core import parallel_state as mpu
from oracle import zigzag as owned
from torch.distributed import ProcessGroup

from mis_plugins.packing import ragged
from mis_plugins.packing.exchange import gathered
from mis_plugins.packing.layout import whole, zigzag
from mis_plugins.packing.ragged import Ragged

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


# Totals of sequences: named, each sum that of its own row and sequence alone, however the rows are summed.

ENDS = torch.tensor([0, 3, 3, 7])  # the second sequence has no token
X = torch.tensor([1.0, -2.0, 4.0, 0.1, 0.2, 0.3, 1e-9])
MASK = torch.tensor([True, False, True, True, True, False, True])


@pytest.mark.parametrize("longest", [0, 2**17])
def test_totals_go_by_their_names(longest: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ragged, "LONG_ON_CPU", longest)
    totals = Ragged(ENDS, MASK).totals({"valid": MASK, "x": X}, {"xx": X}, {"least": X}, {"most": X})
    assert totals["valid"].tolist() == [2.0, 0.0, 3.0]
    wide = X.double()
    for name, row in (("x", wide), ("xx", wide * wide)):
        assert totals[name].tolist() == [float(part.sum()) for part in row.split([3, 0, 4])]
    assert totals["least"].tolist() == [-2.0, torch.inf, float(X[6].double())]
    assert totals["most"].tolist() == [4.0, -torch.inf, float(X[5].double())]
    assert list(totals) == ["valid", "x", "xx", "least", "most"]


def test_without_a_sum_there_are_extremes():
    assert Ragged(ENDS, MASK).totals({}, maxima={"most": X})["most"].tolist()[0] == 4.0
    assert Ragged(ENDS, MASK).totals({}) == {}
