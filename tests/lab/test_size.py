"""What the hook loads and moves through: nothing of the report, explanations or the lab, and no predicate twice."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import peer_cost, size, walk
from mis_plugins import mis
from mis_plugins.config.loading import presets
from mis_plugins.hosts.step_report import Recorder

LOADED = (7_500, 53)  # lines and modules
MOST_FILES = 20
MOST_OPERATORS = {"full": 73, "all": 260}
APART = (
    "mis_plugins.report",
    "mis_plugins.explain",
    "mis_plugins.loss",
    "mis_plugins.routing",
    "true_on_policy",
    "lab",
)


def test_the_hook_loads_nothing_that_a_correction_does_not_need():
    loaded = size.closure()
    assert [name for name in loaded if name.startswith(APART)] == []
    assert sum(loaded.values()) <= LOADED[0] and len(loaded) <= LOADED[1]


def test_another_argument_prints_how_to_call_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["size.py", "--help"])
    assert size.main() == 2
    assert "python lab/size.py --modules" in capsys.readouterr().err


def test_a_large_room_says_which_promise_holds_its_lines():
    rooms = [line.split(maxsplit=2) for line in size.by_room().splitlines() if line]
    assert {room[1] for room in rooms} >= set(size.HOLD)
    counted = sum(int(room[0].replace(",", "")) for room in rooms)
    assert counted == size.lines(size.python_files(*size.PACKAGES, "lab", "tests")), "a line stands in no room"
    assert all(len(room) == 3 for room in rooms if int(room[0].replace(",", "")) > 1_500)


PRESETS = {name: yaml.safe_load(presets()[name].read_text()) for name in walk.SERVED}


@pytest.mark.parametrize("keys", [peer_cost.MIS_YAML, *PRESETS.values()], ids=["mis.yaml", *PRESETS])
def test_a_warm_call_asks_the_config_nothing(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What a config drops, weighs and reads is derived once: no function of `config/model.py` runs again."""
    (tmp_path / "mis.yaml").write_text(yaml.safe_dump(keys))
    flags = {"qkv_format": "thd", "get_mismatch_metrics": False, "custom_config_path": tmp_path / "mis.yaml"}
    args = peer_cost.Namespace(**keys, **flags)
    kwargs = peer_cost.hook_kwargs([3, 2], cp=1, rank=0)
    monkeypatch.setattr(mis, "RECORDER", Recorder(step=(1, 0)))
    call = partial(mis.compute_mis_weights_with_cp, args, **kwargs)
    for _ in range(2):
        call()
    files = size.files_entered(call)
    assert "config/model.py" not in files
    assert len(files) <= MOST_FILES, sorted(files)


def test_one_call_costs_few_operators_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mis, "RECORDER", mis.RECORDER)  # `calls` puts its own in place
    found = {name: count for name, count, _ in size.calls()}
    operators = {name.split()[-1]: count for name, count in found.items() if name.startswith("operators")}
    assert operators["full"] <= MOST_OPERATORS["full"] and operators["all"] <= MOST_OPERATORS["all"]
    assert {count for name, count in found.items() if name.startswith("waits")} == {0}


def test_the_table_sets_what_is_counted_beside_its_goal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "mis_plugins").mkdir()
    (tmp_path / "mis_plugins" / "a.py").write_text("x = 1\n\n# two\n")
    monkeypatch.setattr(size, "ROOT", tmp_path)
    assert size.lines(size.python_files("mis_plugins", "lab")) == 3
    assert size.bytes_of_wheel() is None
    assert size.as_text(("lines", 3, 2)).split() == "lines 3 at most 2 MISSED".split()
    assert size.as_text(("cases", 3, None)).split() == ["cases", "3"]
