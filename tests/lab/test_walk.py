"""The walk of a log-prob, counted: on functions of which the counts are known, and on the hook."""

import json
from pathlib import Path

import pytest
import torch
from commands import ran

from lab import walk

COMMAND = Path(walk.__file__)
MOST_STOPS, MOST_RETURNS = 16, 6

FILES = {
    "first.py": """
def hook(x, second, third):
    check(x)
    doubled = second["twice"](x)
    aside(doubled)
    second["twice"](x)
    third["deaf"](x)
    return third["named"]["row"](helper(doubled))


def check(x):
    return (x + 1).sum()


def aside(x):
    return x * 3


def helper(x):
    return x - 1
""",
    "second.py": "def twice(x):\n    return inner(x)\n\n\ndef inner(x):\n    return x.mul_(2)\n",
    "third.py": "def deaf(x):\n    return x.shape\n\n\nnamed = {'row': lambda x: x.neg()}\n",
}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[walk.Call, list[torch.Tensor]]:
    """Three files of a package of which the walk is told that it is ours."""
    package = tmp_path / "ours"
    monkeypatch.setattr(walk, "PACKAGE", package)
    first, second, third = ({"__name__": name} for name in FILES)
    for space, (name, source) in zip((first, second, third), FILES.items(), strict=True):
        exec(compile(source, str(package / name), "exec"), space)
    given = torch.ones(1)
    return lambda: [first["hook"](given, second, third)], [given]  # type: ignore[operator]


def test_a_stop_is_a_file_in_which_what_was_given_is_changed_on_its_way_to_the_answer(
    call: tuple[walk.Call, list[torch.Tensor]],
):
    """`check` and `aside` compute what the answer does not depend on, `deaf` runs no operator, `row` has no name."""
    found = walk.follow("example", *call)
    assert [(Path(x.file).name, x.functions, x.returns) for x in found.stops] == [
        ("first.py", ("hook",), False),
        ("second.py", ("twice", "inner"), False),
        ("first.py", ("helper",), True),
        ("third.py", ("<lambda>",), False),
    ]
    assert (found.files, found.returns) == (3, 1)


@pytest.mark.parametrize("preset", walk.SERVED)
def test_the_walk_does_not_grow(preset: str):
    """From the hook to its answer; docs/architecture.md tells the walk of `mis`."""
    found = walk.follow(preset, *walk.hook_call(preset))
    assert found.stops[0].functions[0] == "compute_mis_weights_with_cp"
    assert any("token_stage" in stop.functions for stop in found.stops)
    assert len(found.stops) <= MOST_STOPS and found.returns <= MOST_RETURNS, str(found)


def test_smoke(tmp_path: Path):
    """There are as many stops in the figures as in the text."""
    path = tmp_path / "walk.json"
    done = ran(COMMAND, "--smoke", "--json", path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(path.read_text())["walks"]
    stops = found["stops"]
    assert found["returns"] == sum(stop["returns"] for stop in stops)
    assert {"correct", "totals_of", "Ragged.totals"} <= {x for stop in stops for x in stop["functions"]}
    counted = f"mis: {len(stops)} stops in {found['files']} files, {found['returns']} returns"
    assert done.stdout.startswith(counted)
    document = path.with_suffix(".md").read_text()
    assert document.startswith("```\npython -m lab.walk --smoke") and counted in document
