"""Operations that `lab/compiled.py` compiles: with pinned kernels each gives a row alone its bits in a batch."""

from __future__ import annotations

import pytest
import torch

from lab import compiled
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.kernels.pin import pinned


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_rows_are_equal_alone_and_in_a_batch(dtype: str):
    with pinned(Contract(dtype=dtype)), torch.no_grad():
        for name, (function, arguments) in compiled.operations(DTYPES[dtype]).items():
            together = function(*arguments)
            alone = [function(*(one[row : row + 1] for one in arguments)) for row in range(compiled.ROWS)]
            assert compiled.equal_rows(torch.cat(alone), together) == compiled.ROWS, name


def test_rows_are_counted_by_their_bits():
    zeros = torch.zeros(3, 2)
    assert compiled.equal_rows(zeros, zeros) == 3
    assert compiled.equal_rows(torch.tensor([[0.0, 0.0], [-0.0, 0.0], [0.0, 1e-45]]), zeros) == 1
