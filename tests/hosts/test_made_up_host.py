"""A host is one record: the policy loss, the step report and `config check` serve it alike.

It is registered, or named by an entry point of the group `mis_plugins.hosts`.
"""

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
from commands import ROOT, ConfigCommand
from forks import Ended, ended
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


def loss_of(step: Step, package: str = "made_up", logits: float = 2.0, config: dict[str, Any] = CONFIG) -> Tensor:
    """The loss of the host that has this package; its logits are so many times the log-probs."""
    batch, given = step.batch(), logits * torch.cat(step.rows("target"))
    return mis.policy_loss(flags(mis=config), batch, given.requires_grad_(), reducer(batch, package))[0]


PLAIN = replace(MADE_UP, package="plain", scores=lambda args, batch, logits: scores(args, batch, 2 * logits))


def test_policy_loss_and_step_report(logged: Sequence[Mapping[str, float]], monkeypatch: pytest.MonkeyPatch):
    """The loss is the one of another host whose scores agree; the metrics of the step reach the host's own tracking."""
    step, args = random_step(0), flags(mis=CONFIG)
    mis.report_step(args, 0, 0)
    loss = loss_of(step)
    mis.report_step(args, 0, 1)
    (row,) = logged
    assert row["train/mis_step/tokens"] == sum(map(sum, (x.mask for x in step.responses)))
    registry.register(replace(PLAIN, name="plain", runs=lambda args: False))
    assert torch.equal(loss_of(step, "plain", 1.0), loss)
    assert loss.requires_grad


def test_a_host_that_nobody_knows_is_told_once_where_metrics_go(caplog: pytest.LogCaptureFixture):
    assert unknown.HOST.tracking() is unknown.HOST.tracking() is None
    assert caplog.messages == [unknown.NOTICE]


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


# ------------------------------------------------------------------------------------------------- entry points

HOST = """
from dataclasses import replace
from mis_plugins.hosts import registry
from mis_plugins.hosts.host import Host

def parallel():
    from mis_plugins.packing.ragged import Ranks
    return Ranks(), (1, 0)

def scores(args, batch, logits):
    return list(logits.split(list(batch["response_lengths"]))), None

HOST = Host(name="far", title="the far host", package="far_host", runs=lambda args: False, parallel=parallel,
            scores=scores, own_loss=lambda: None, reports=lambda ranks: True, megatron=False, records=("slime",))
NO_HOST = "far"
TAKEN = replace(HOST, name="miles")
"""
LOSS = """
import torch
from test_loss_hook import flags, random_step, reducer
from mis_plugins import mis
batch, logits = random_step(0).batch(), torch.cat(random_step(0).rows("target")).requires_grad_()
print(float(mis.policy_loss(flags(mis={"weight": {"upper": 1.05}}), batch, logits, reducer(batch, "far_host"))[0]))
"""
CHECK = """
from mis_plugins.__main__ import main
print(main(["config", "check", "tis", "--host", "far"]))
"""


SERVED = "far_host:HOST"
REFUSED = {
    "far_host:GONE": "far = far_host:GONE does not load: AttributeError",
    "no_such_module:HOST": "far = no_such_module:HOST does not load: ModuleNotFoundError",
    "far_host:NO_HOST": "far = far_host:NO_HOST is no mis_plugins.hosts.host.Host",
    "far_host:TAKEN": "far = far_host:TAKEN takes the name miles of another host",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How a process ended in which a distribution with this entry point is installed, by the entry point."""
    scripts = {}
    for target in (SERVED, *REFUSED):
        folder = tmp_path_factory.mktemp("installed")
        (folder / "far_host.py").write_text(HOST)
        info = folder / "far_host-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-host\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[mis_plugins.hosts]\nfar = {target}\n")
        path = [str(part) for part in (folder, ROOT / "tests/support", ROOT / "tests/loss")]
        script = LOSS + CHECK if target == SERVED else "import mis_plugins.hosts.registry"
        scripts[target] = f"sys.path[:0] = {path}\n{script}"
    results = ended([*scripts.values()], tmp_path_factory.mktemp("ended"), "import sys, torch", COLUMNS="200")
    return dict(zip(scripts, results, strict=True))


def test_an_installed_host_is_served(installed: dict[str, Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed[SERVED].code == 0, installed[SERVED].errors
    first, *told, code = installed[SERVED].out.splitlines()
    monkeypatch.setitem(registry.every_host(), MADE_UP.name, PLAIN)
    here = loss_of(random_step(0), "plain", 1.0, {"weight": {"upper": 1.05}})
    assert float(first) == float(here) and code == "0" and told


@pytest.mark.parametrize("target", REFUSED)
def test_an_entry_point_that_is_no_host_is_named(target: str, installed: dict[str, Ended]) -> None:
    assert installed[target].code
    assert f"InputError: mis_plugins.hosts: {REFUSED[target]}" in installed[target].errors
