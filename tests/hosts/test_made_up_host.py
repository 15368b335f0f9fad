"""A host is one record: registered, it is served by the policy loss, the step report and `config check` alike."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stand_ins
import torch
from commands import ConfigCommand
from test_loss_hook import Step, flags, random_step, reducer
from torch import Tensor

from mis_plugins import mis
from mis_plugins.errors import InputError
from mis_plugins.hosts import adapters, registry
from mis_plugins.hosts.adapters import unknown
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
    own_loss=lambda: loss_of,
    reports=lambda ranks: True,
    tracking=lambda: log if "made_up" in sys.modules else None,
    records=("slime",),
    step_hook=False,
)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[Mapping[str, float]]]:
    stand_ins.load({"made_up": {"log": log}}, monkeypatch)
    LOGGED.clear()
    registry.register(MADE_UP)
    yield LOGGED
    for name in (MADE_UP.name, "plain"):
        registry.HOSTS.pop(name, None)


def loss_of(step: Step) -> Tensor:
    batch, logits = step.batch(), 2 * torch.cat(step.rows("target"))
    return mis.policy_loss(flags(mis=CONFIG), batch, logits.requires_grad_(), reducer(batch, "made_up"))[0]


def test_policy_loss_and_step_report(logged: Sequence[Mapping[str, float]], monkeypatch: pytest.MonkeyPatch):
    """The loss is the one of another host whose scores agree; the metrics of the step reach the host's own tracking."""
    step, args = random_step(0), flags(mis=CONFIG)
    mis.report_step(args, 0, 0)
    loss = loss_of(step)
    mis.report_step(args, 0, 1)
    (row,) = logged
    assert row["train/mis_step/tokens"] == sum(map(sum, (x.mask for x in step.responses)))
    halved = torch.cat(step.rows("target")).requires_grad_()
    plain = lambda args, batch, logits: scores(args, batch, 2 * logits)  # noqa: E731
    other = replace(MADE_UP, name="plain", package="plain", scores=plain, runs=lambda args: False)
    registry.register(other)
    batch = step.batch()
    assert torch.equal(mis.policy_loss(args, batch, halved, reducer(batch, "plain"))[0], loss)
    assert loss.requires_grad


def test_which_host_runs(logged: Sequence[Mapping[str, float]]):
    assert registry.current() is registry.current(flags()) is MADE_UP
    assert registry.current(flags(), reducer({"loss_masks": []}, "made_up")) is MADE_UP
    del sys.modules["made_up"]

    left = registry.current()
    assert left is registry.HOSTS.get("embedded", unknown.HOST)


def test_a_host_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file beside the others that makes a record is all that the registry asks for."""
    known = {*registry.every_host(), "made-up"} - {"embedded"}
    monkeypatch.setattr(registry, "HOSTS", {"unknown": unknown.HOST})
    (tmp_path / "made_up_late.py").write_text("from test_made_up_host import MADE_UP as HOST\n")
    monkeypatch.setattr(adapters, "__path__", [*adapters.__path__, str(tmp_path)])
    assert registry.current() is unknown.HOST and list(registry.HOSTS) == ["unknown"]
    with monkeypatch.context() as loaded:
        loaded.setitem(sys.modules, "made_up", ModuleType("made_up"))
        assert registry.current() == MADE_UP and list(registry.HOSTS) == ["unknown", "made-up"]
    assert set(registry.every_host()) == known


TRACKING = {name: registry.every_host()[name].needs.tracking.addresses[0].module for name in ("slime", "miles")}
BY_MODULE = {"made_up": "made-up", **{path: name for name, path in TRACKING.items()}, "argparse": "unknown"}


@pytest.mark.parametrize("order", list(permutations(["unknown", "miles", "fsdp", "slime", "made-up"])))
def test_the_order_of_hosts_decides_nothing(order: Sequence[str], monkeypatch: pytest.MonkeyPatch):
    """slime has --train-backend too: its process with fsdp is slime's, and Miles's is that of Miles on FSDP."""
    known = registry.every_host() | {"made-up": MADE_UP}
    monkeypatch.setattr(registry, "HOSTS", {name: known[name] for name in order})
    fsdp = flags(train_backend="fsdp")
    assert registry.current(fsdp).name == registry.current(fsdp, reducer({"loss_masks": []}, "miles")).name == "fsdp"
    assert registry.current(flags(), reducer({"loss_masks": []}, "miles")).name == "miles"
    for module, name in BY_MODULE.items():
        with monkeypatch.context() as loaded:
            loaded.setitem(sys.modules, module, ModuleType(module))
            assert registry.current(flags()).name == name
            assert registry.current(fsdp).name == ("fsdp" if name in ("miles", "unknown") else name)


def test_two_hosts_of_one_process_are_refused(monkeypatch: pytest.MonkeyPatch):
    for module in TRACKING.values():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(InputError, match="^Miles and slime: modules of both say that this process is theirs; load"):
        registry.current()


def test_config_check(logged: Sequence[Mapping[str, float]], config_command: ConfigCommand):
    assert "made-up" in recorded()
    told = config_command("mis: {weight: {upper: 2.0}, metrics: all}", "--host", "made-up").out
    assert "which the made-up host does not call" in told and "report_step" not in told
