"""Totals of sequences: named, each sum that of its own row and sequence alone, however the rows are summed."""

import pytest
import torch

from mis_plugins.packing import ragged
from mis_plugins.packing.ragged import Ragged

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
