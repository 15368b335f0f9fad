"""The benchmarks run, and the bounds they exist to watch hold: operators, waits and collectives do not grow with N."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import yaml
from commands import ran
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lab import peer_cost, tallies
from lab.peer_cost import OURS
from lab.source_parity import Padded, difference
from mis_plugins import mis
from mis_plugins.config.loading import load, presets
from mis_plugins.hosts.step_report import Recorder

MOST_OPERATORS = 300
DOCUMENTED_OPERATORS = {1: 230, 2: 257}  # by context-parallel ranks: in docs/gpu.md
BUDGET = {"full": MOST_OPERATORS, "all": 600}
MOST_COLLECTIVES = 3


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of our hook under Miles's own config in one `--smoke` run: N 8 and 64, CP 1 and 2."""
    path = tmp_path_factory.mktemp("lab") / "cost.json"
    done = ran("-m", "lab.peer_cost", "--smoke", "--json", path)
    assert done.returncode == 0, done.stderr
    assert "```\npython -m lab.peer_cost --smoke" in path.with_suffix(".md").read_text()
    rows = json.loads(path.read_text())["rows"]
    assert {"ours, watch + host", "floor: exponentiate"} <= {row["way"] for row in rows}
    return [row for row in rows if row["way"] == "ours, mis.yaml"]


def test_smoke_holds_the_bounds(smoke: list[dict[str, Any]]):
    assert [(row["sequences"], row["cp"]) for row in smoke] == [(8, 1), (64, 1), (8, 2), (64, 2)]
    for ours in smoke:
        assert ours["operators"] <= DOCUMENTED_OPERATORS[ours["cp"]]
        assert ours["waits"] == 0
        assert ours["collectives"] == 0 if ours["cp"] == 1 else 1 <= ours["collectives"] <= MOST_COLLECTIVES
        assert ours["peak_bytes"] > 0 and ours["seconds"] > 0


@pytest.mark.parametrize("cp", [1, 2])
def test_operators_do_not_grow_with_sequences(smoke: list[dict[str, Any]], cp: int):
    few, many = (row for row in smoke if row["cp"] == cp)
    assert (few["operators"], few["collectives"]) == (many["operators"], many["collectives"])


def called(hook: peer_cost.Hook, metrics: str = "full") -> peer_cost.Call:
    """A call of a hook on four sequences."""
    kwargs = peer_cost.hook_kwargs([5, 1, 70, 31], cp=1, rank=0)
    return peer_cost.called(hook, peer_cost.hook_args(metrics), kwargs)


@pytest.mark.parametrize("metrics", ["core", "none"])
def test_fewer_metrics_cost_less(metrics: str):
    assert tallies.tally(called(OURS, metrics)).operators < tallies.tally(called(OURS)).operators


@pytest.mark.parametrize("metrics", ["full", "all"])
def test_every_preset_is_within_the_budget(metrics: str, tmp_path: Path):
    """On the second micro-batch of a step, when there is something to merge; not of one that is asked for a slope."""

    def work(rank: int) -> dict[str, int]:
        return {name: _operators(args, metrics, rank) for name, args in hooked.items()}

    hooked = _presets_of_the_hook()
    assert len(hooked) > 40
    for rank in launch.run_ranks(2, 2, work, tmp_path):
        assert {name: count for name, count in rank.items() if count > BUDGET[metrics]} == {}


WITH_REDUCTION = 7_000  # operators of the hook, the step's sums and the host's averages, of 256 sequences


@pytest.mark.parametrize("metrics", ["watch", "full"])
def test_what_the_host_averages_costs_more_than_the_hook(metrics: str, monkeypatch: pytest.MonkeyPatch):
    """In docs/costs.md: a metric handed back costs the host five operators a sequence, of which `watch` hands five."""
    monkeypatch.setattr(mis, "RECORDER", Recorder(step=(1, 0)))
    args = Namespace(use_tis=True, mis={"weight": {"upper": 2.0}, "metrics": metrics}, qkv_format="thd")
    kwargs = peer_cost.hook_kwargs([8] * 256, cp=1, rank=0)
    call = peer_cost.averaged(OURS, args, kwargs)
    call()
    counted = tallies.tally(call)
    assert not counted.waits
    assert (counted.operators <= WITH_REDUCTION) == (metrics == "watch")


def _presets_of_the_hook() -> dict[str, Namespace]:
    """Every preset that the TIS hook serves and that corrects; no router runs here that `statistic: route` reads."""
    flags = {"use_tis": True, "qkv_format": "thd", "get_mismatch_metrics": False}
    return {
        name: Namespace(**flags | yaml.safe_load(path.read_text()))
        for name, path in presets().items()
        if (config := load(path)).corrects and not (config.needs_loss_hook or config.reads_routes)
    }


def _operators(args: Namespace, metrics: str, rank: int) -> int:
    nested = {**getattr(args, "mis", {}), "metrics": metrics}
    kwargs = peer_cost.hook_kwargs([5, 1, 70, 31], cp=2, rank=rank)
    mis.RECORDER = Recorder(step=(1, 0))  # of this rank, a process of its own
    call = peer_cost.called(OURS, Namespace(**vars(args) | {"mis": nested}), kwargs)
    call()
    return tallies.tally(call).operators


def test_no_operator_of_ours_depends_on_data(monkeypatch: pytest.MonkeyPatch):
    """Fake tensors have no values: whatever would wait for the device raises."""
    monkeypatch.setattr(mis, "RECORDER", Recorder(step=(1, 0)))  # without a step, it reads a copy that has arrived
    with FakeTensorMode():
        called(OURS)()
        with pytest.raises(DataDependentOutputException):
            called(peer_cost.sequence_by_sequence)()


def test_tally_sees_waits_and_copies():
    def waiting() -> None:
        x = torch.arange(4.0)
        float(x[x > 1].sum())
        torch.tensor(3.0)
        x.repeat_interleave(torch.tensor([1, 2, 3, 4]))
        torch.allclose(x, x)

    counted = tallies.tally(waiting)
    assert counted.waits == {"index": 1, "_local_scalar_dense": 1, "repeat_interleave": 1, "allclose": 1}
    assert counted.copies == 2


def test_peak_counts_what_lives_at_once():
    def two_of_three() -> torch.Tensor:
        first = torch.ones(1000)
        second = first * 2
        del first
        return second + 1

    assert 8000 <= tallies.peak_bytes(two_of_three) < 9000


def test_parity_without_a_host_is_no_verdict(tmp_path: Path):
    done = ran("-m", "lab.host_parity", "--host", "slime", "--checkout", tmp_path)
    assert done.returncode == 2
    assert "could not compare" in done.stdout and "no package slime/" in done.stdout


def test_a_weight_of_a_peer_that_is_nan_is_not_our_zero():
    far = Padded(torch.zeros(1, 2), torch.full((1, 2), -9.0), torch.ones(1, 2, dtype=torch.bool))
    peer = lambda x: (torch.full_like(x.proximal, torch.nan), x.mask)  # noqa: E731
    assert difference("nemo-rl-seq-mask-tis", peer, far) == (torch.inf, 0)


@pytest.mark.parametrize("name", ["peer_cost", "host_parity"])
def test_figures_that_could_not_be_written_are_not_measured(name: str, tmp_path: Path):
    """Exit code 2: 1 means different."""
    host = ["--host", "miles", "--checkout", tmp_path] if name == "host_parity" else []
    done = ran("-m", f"lab.{name}", *host, "--json", tmp_path)
    assert done.returncode == 2
    assert f"argument --json: {tmp_path} cannot be written" in done.stderr
