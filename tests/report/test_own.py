"""The run's own config: found in what the run left, and held to what a bound is meant for."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_readers import field, some_records, write_lines

from mis_plugins.__main__ import main
from mis_plugins.report.own import found_config
from mis_plugins.report.readers.settings import settings
from mis_plugins.report.readers.source import Problems
from mis_plugins.report.record import Record

MIS = {"weight": {"upper": 3.0}}


def summary(folder: Path, **arguments: Any) -> Path:
    file = folder / "summary.json"
    file.write_text(json.dumps({"status": "finished", "arguments": arguments}, indent=1))
    return file


def wandb(folder: Path, **config: Any) -> Path:
    """An offline wandb run: its first record holds the config."""
    items = b"".join(
        field(1, field(2, key.encode()) + field(16, json.dumps(value).encode()))
        for key, value in config.items()
    )
    content = field(17, field(1, b"name") + field(4, items))
    file = folder / "run-a.wandb"
    header = struct.pack("<IHB", zlib.crc32(content), len(content), 1)
    file.write_bytes(b":W&B" + bytes(3) + header + content)
    return file


@pytest.mark.parametrize("write", [summary, wandb])
def test_a_config_is_found_in_what_a_run_left(tmp_path: Path, write) -> None:
    file = write(tmp_path, use_tis=True, mis=MIS, lr=1e-6, use_te=True)
    problems = Problems()
    found = found_config(settings([file], problems), problems)
    assert found is not None and found.name == f"the config in {file.name}" and not problems.told
    assert found.config.weight is not None and found.config.weight.upper == 3


def test_a_run_without_correction_has_no_config_of_its_own(tmp_path: Path) -> None:
    problems = Problems()
    for arguments in ({"use_tis": False, "mis": MIS}, {"lr": 1.0}):
        assert found_config(settings([summary(tmp_path, **arguments)], problems), problems) is None
    assert not problems.told


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    problems = Problems()
    file = summary(tmp_path, use_tis=True, mis={"wait": {}})
    assert found_config(settings([file], problems), problems) is None
    assert f"{file}: the run's own config cannot be read" in problems.told[0]


def test_a_file_that_a_run_names_is_not_opened(tmp_path: Path) -> None:
    """Arguments may name any file of the machine."""
    file = summary(tmp_path, use_tis=True, mis=MIS, custom_config_path=str(tmp_path), use_tiss=True)
    problems = Problems()
    assert found_config(settings([file], problems), problems) is not None and not problems.told


def spread(sigma: float) -> list[Record]:
    generator = torch.Generator().manual_seed(0)
    return [
        replace(
            one,
            proximal_log_probs=one.behavior_log_probs + sigma * torch.randn(one.size, generator=generator),
        )
        for one in some_records(lengths=(200, 200, 200))
    ]


def judged(tmp_path: Path, sigma: float, config: str) -> dict[str, Any]:
    write_lines(tmp_path / "run.jsonl", spread(sigma))
    (tmp_path / "own.yaml").write_text(config)
    command = ["report", str(tmp_path / "run.jsonl"), "--config", str(tmp_path / "own.yaml")]
    assert main([*command, "--sweep", "tis", "--output", str(tmp_path / "out")]) == 0
    return json.loads((tmp_path / "out" / "report.json").read_text())


def test_a_bound_on_outliers_did_what_it_means(tmp_path: Path) -> None:
    told = judged(tmp_path, 0.4, "mis: {weight: {upper: 3}}\n")
    assert told["own_config"]["as_meant"]
    (bound, direction) = told["own_config"]["told"]
    assert bound.startswith("weight.bound: truncate acts on 0.") and bound.endswith(
        "for which a bound is meant"
    )
    assert direction.startswith("the gradient's direction goes from ")
    assert any("did what its bounds mean" in line for line in told["verdict"]["lines"])


def test_a_bound_inside_the_bulk_did_not(tmp_path: Path) -> None:
    told = judged(
        tmp_path, 0.4, "mis: {weight: {upper: 1.1, bound: mask}, reject: [{lower: 0.9, upper: 9}]}\n"
    )
    assert not told["own_config"]["as_meant"]
    bound, rule = told["own_config"]["told"][:2]
    assert bound.endswith("% of the tokens, which is more than outliers") and rule.startswith(
        "reject[0] drops 4"
    )
    assert any("did not do what its bounds mean" in line for line in told["verdict"]["lines"])
    assert "The config did not do what its bounds mean." in (tmp_path / "out" / "report.html").read_text()


def test_a_bound_that_nothing_reaches_never_acts(tmp_path: Path) -> None:
    told = judged(tmp_path, 0.01, "mis: {weight: {upper: 3}}\n")["own_config"]
    assert told["as_meant"] and told["told"][0] == "weight.bound: truncate never acts: no token lies outside"
