"""The report's step metrics equal those that a host logged: a record of its real loop, read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_report import surveyed

from mis_plugins.config import reading
from mis_plugins.report.record import Record

RECORD = Path(__file__).parents[2] / "lab/results/in_host/miles-report-step.json"
SPREAD = 1e-4  # of the root of a difference of squares


def test_the_exact_metrics_are_those_of_the_run() -> None:
    record = json.loads(RECORD.read_text())
    rows = [row for batch in record["micro_batches"] for row in batch]
    columns = [[torch.tensor(row[name]) for name in ("behavior", "proximal", "mask")] for row in rows]
    records = [Record(1, str(place), *column) for place, column in enumerate(columns)]
    told = record["steps"][record.get("recorded", len(record["steps"]) - 1)]["metrics"]
    found = surveyed(records, reading.from_mapping(record["config"])).steps[1]
    wanted = {name: value for name in found if (value := told.get(f"train/mis_step/{name}")) is not None}
    assert len(wanted) >= 40
    for name, value in wanted.items():
        bound = SPREAD if name.endswith(("std", "correlation")) else 1e-6
        assert found[name] == pytest.approx(value, rel=bound, abs=bound), name
