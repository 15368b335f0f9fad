"""A host of another distribution: its entry point of the group `mis_plugins.hosts` is all that the hooks ask for."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_loss_hook import flags, random_step, reducer
from test_made_up_host import MADE_UP, scores

from mis_plugins import mis
from mis_plugins.hosts.registry import every_host

ROOT = Path(__file__).parents[2]
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


def ran(code: str, target: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which a distribution with this entry point is installed."""
    (folder / "far_host.py").write_text(HOST)
    info = folder / "far_host-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-host\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mis_plugins.hosts]\nfar = {target}\n")
    path = [folder, ROOT, ROOT / "tests/support", ROOT / "tests/loss"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "200"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_installed_host_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ran(LOSS + CHECK, "far_host:HOST", tmp_path)
    assert done.returncode == 0, done.stderr
    first, *told, code = done.stdout.splitlines()
    step = random_step(0)
    batch, logits = step.batch(), torch.cat(step.rows("target")).requires_grad_()
    config = {"weight": {"upper": 1.05}}
    plain = replace(MADE_UP, package="plain", scores=lambda args, batch, logits: scores(args, batch, 2 * logits))
    monkeypatch.setitem(every_host(), MADE_UP.name, plain)
    here = mis.policy_loss(flags(mis=config), batch, logits, reducer(batch, "plain"))[0]
    assert float(first) == float(here) and code == "0" and told


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("far_host:GONE", "far = far_host:GONE does not load: AttributeError"),
        ("no_such_module:HOST", "far = no_such_module:HOST does not load: ModuleNotFoundError"),
        ("far_host:NO_HOST", "far = far_host:NO_HOST is no mis_plugins.hosts.host.Host"),
        ("far_host:TAKEN", "far = far_host:TAKEN takes the name miles of another host"),
    ],
)
def test_an_entry_point_that_is_no_host_is_named(target: str, why: str, tmp_path: Path) -> None:
    done = ran("import mis_plugins.hosts.registry", target, tmp_path)
    assert done.returncode and f"InputError: mis_plugins.hosts: {why}" in done.stderr
