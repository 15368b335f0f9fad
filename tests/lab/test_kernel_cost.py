"""The benchmark runs on every kernel and writes what it measured."""

from __future__ import annotations

import pytest

from lab import kernel_cost


@pytest.mark.parametrize("kind", ["prefill", "decode", "train"])
def test_one_row(kind, monkeypatch):
    """The workload is small, because the tile backend is written in Python."""
    monkeypatch.setitem(kernel_cost.WORKLOADS, "two of 16", (kind, 2, 16))
    row = kernel_cost.measure("h256", "bf16", "two of 16", calls=1)
    assert min(row.stock, row.native, row.tile, row.leaves) > 0
