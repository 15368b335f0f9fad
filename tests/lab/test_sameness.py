"""The command tells answers that differ, and what calls leave behind."""

import json
from pathlib import Path

import pytest
import torch
from commands import ran

from lab import sameness


def test_a_short_run_finds_nothing_that_differs(tmp_path: Path):
    done = ran("-m", "lab.sameness", "--smoke", "--json", tmp_path / "same.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "same.json").read_text())["rows"]
    assert {row["check"] for row in rows} >= {"1 and 2 threads", "CP 4", "long haul", "50,000 tokens"}
    metrics = {row["of"]: row["found"] for row in rows if row["check"] == "metric in float64"}
    assert len(metrics) > 100 and not metrics["nonfinite_rollout_tokens"].startswith("0")


@pytest.mark.parametrize(("factor", "mask", "holds"), [(1 + 2**-23, 1, True), (1 + 2**-21, 1, False), (1.0, 0, False)])
def test_a_factor_may_be_two_spacings_off_and_a_mask_not(factor: float, mask: int, holds: bool):
    usual = torch.ones(3), torch.ones(3, dtype=torch.int)
    found = torch.tensor([1.0, factor, 1.0]), torch.tensor([1, mask, 1], dtype=torch.int)
    assert sameness._beside("CP 2", "mis", found, usual).holds is holds


@pytest.mark.parametrize("keeps", [True, False])
def test_tensors_that_calls_keep_are_seen(keeps: bool):
    kept: list[torch.Tensor] = []
    row = sameness._grown("calls", lambda _: kept.append(torch.ones(2)) if keeps else torch.ones(2), 50)
    assert row.holds is not keeps


def test_a_metric_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sameness, "finalize", lambda *_: {"kl_k1": -0.5, "tokens": 54.0})
    assert {row.of: row.holds for row in sameness.metrics([40, 24])} == {"kl_k1": False, "tokens": True}
