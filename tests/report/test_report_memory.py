"""The benchmark of the report's memory writes dumps that the report reads whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_readers import read

from lab import report_memory


def test_its_dumps_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_memory, "RESPONSES", 3)
    monkeypatch.setattr(report_memory, "LENGTH", 40)
    made = report_memory.write_dumps(tmp_path / "train_data", 20_000)
    found, told = read(tmp_path)
    assert not told and made["rollouts"] > 1
    assert {one.step for one in found} == set(range(made["rollouts"]))
    assert sum(int(one.loss_mask.sum()) for one in found) == made["tokens"]
    assert made["bytes"] == made["rollouts"] * made["bytes of a rollout"] >= 20_000
