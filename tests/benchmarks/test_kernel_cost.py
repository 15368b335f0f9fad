"""The benchmark runs on every kernel and writes what it measured."""

from __future__ import annotations

import json

import kernel_cost
import pytest


@pytest.mark.parametrize("kind", ["prefill", "decode", "train"])
def test_one_row(kind, monkeypatch):
    """The workload is small, because the tile backend is written in Python."""
    monkeypatch.setitem(kernel_cost.WORKLOADS, "two of 16", (kind, 2, 16))
    row = kernel_cost.measure("h256", "bf16", "two of 16", calls=1)
    assert min(row.stock, row.native, row.tile, row.leaves) > 0


def test_results_hold_the_ratios_and_where_they_were_measured(tmp_path):
    row = kernel_cost.Row("h256", "fp32", "decode B1", 3, stock=2.0, native=3.0, tile=9.0, leaves=3.3)
    kernel_cost.write(tmp_path / "cost.json", [row])
    assert json.loads((tmp_path / "cost.json").read_text())["rows"][0]["tile"] == 9.0
    table = (tmp_path / "cost.md").read_text()
    assert "| h256 | fp32 | decode B1 | 2.00 | 3.00 | 9.00 | 3.30 | 1.50 | 4.50 | 1.10 | 3 | yes |" in table
    assert "bfloat16 products of native" in table
