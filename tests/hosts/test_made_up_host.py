"""A host is one record: registered, it is served by the policy loss, the step report and `config check` alike."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_loss_hook import Step, flags, random_step, reducer
from torch import Tensor

from mis_plugins import mis
from mis_plugins.__main__ import main
from mis_plugins.hosts import embedded, registry
from mis_plugins.hosts.arguments import recorded
from mis_plugins.hosts.host import Batch, Host, Scores
from mis_plugins.packing.ragged import Ranks

CONFIG = {"weight": {"upper": 1.05}, "metrics": "all"}
LOGGED: list[Mapping[str, float]] = []


def log(args: Any, metrics: Mapping[str, float], step_key: str) -> None:
    """The made-up host's tracking."""
    LOGGED.append(metrics)


def scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    """The made-up host's logits are twice its log-probs."""
    return [x / 2 for x in logits.split(list(batch["response_lengths"]))], None


MADE_UP = Host(
    name="made-up",
    title="the made-up host",
    package="made_up",
    runs=lambda args: "made_up" in sys.modules,
    parallel=lambda: (Ranks(), (1, 0)),
    scores=scores,
    own_loss="made_up.loss",
    reports=lambda ranks: True,
    tracking="made_up",
    records=("slime",),
    step_hook=False,
)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Mapping[str, float]]]:
    module = ModuleType("made_up")
    module.__dict__["log"] = log
    monkeypatch.setitem(sys.modules, "made_up", module)
    LOGGED.clear()
    registry.register(MADE_UP)
    yield LOGGED
    del registry.HOSTS[MADE_UP.name]


def loss_of(step: Step) -> Tensor:
    batch, logits = step.batch(), 2 * torch.cat(step.rows("target"))
    return mis.policy_loss(flags(mis=CONFIG), batch, logits.requires_grad_(), reducer(batch, "made_up"))[0]


def test_policy_loss_and_step_report(logged: Sequence[Mapping[str, float]], monkeypatch: pytest.MonkeyPatch):
    """The loss is the embedded host's on the same scores; the metrics of the step reach the host's own tracking."""
    step, args = random_step(0), flags(mis=CONFIG)
    mis.report_step(args, 0, 0)
    loss = loss_of(step)
    mis.report_step(args, 0, 1)
    (row,) = logged
    assert row["train/mis_step/tokens"] == sum(map(sum, (x.mask for x in step.responses)))
    halved = torch.cat(step.rows("target")).requires_grad_()
    plain = lambda args, batch, logits: scores(args, batch, 2 * logits)  # noqa: E731
    monkeypatch.setitem(registry.HOSTS, "embedded", replace(embedded.HOST, scores=plain))
    batch = step.batch()
    assert torch.equal(mis.policy_loss(args, batch, halved, reducer(batch, "mis_plugins"))[0], loss)
    assert loss.requires_grad


def test_which_host_runs(logged: Sequence[Mapping[str, float]]):
    assert registry.current() is registry.current(flags()) is MADE_UP
    assert registry.current(flags(), reducer({"loss_masks": []}, "made_up")) is MADE_UP
    del sys.modules["made_up"]
    assert registry.current() is embedded.HOST


def test_config_check(logged: Sequence[Mapping[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "config.yaml"
    file.write_text("mis: {weight: {upper: 2.0}, metrics: all}")
    assert list(recorded()) == ["miles", "slime", "fsdp", "made-up"]
    assert main(["config", "check", str(file), "--host", "made-up"]) == 0
    told = capsys.readouterr().out
    assert "which the made-up host does not call" in told and "report_step" not in told
