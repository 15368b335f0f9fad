"""The walk of a log-prob, counted: on functions of which the counts are known, and on the hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import walk

COMMAND = Path(walk.__file__)

FILES = {
    "first.py": """
def hook(x, second, third):
    \"\"\"Begin.

    More of it.
    \"\"\"
    second["twice"](x)
    aside(x)
    second["twice"](x)
    third["deaf"](3)
    return [value for value in (lambda: [third["held"]([x])])()]


def aside(x):
    return x
""",
    "second.py": "def twice(x):\n    return inner(x)\n\n\ndef inner(x):\n    return x\n",
    "third.py": "def deaf(number):\n    return number\n\n\ndef held(xs):\n    return xs\n",
}


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Three files of a package of which the walk is told that it is ours."""
    package = tmp_path / "ours"
    monkeypatch.setattr(walk, "PACKAGE", package)
    first, second, third = ({"__name__": name} for name in FILES)
    for space, (name, source) in zip((first, second, third), FILES.items(), strict=True):
        exec(compile(source, str(package / name), "exec"), space)
    return lambda: first["hook"](torch.ones(1), second, third)  # type: ignore[operator]


def test_each_function_that_is_given_a_tensor_is_one_stop(hook: Callable[[], object]):
    """`inner` is in the file of its caller, and the second call of `twice` opens nothing new."""
    found = walk.follow("example", hook)
    assert [(Path(x.file).name, x.function, x.returns) for x in found.stops] == [
        ("first.py", "hook", False),
        ("second.py", "twice", False),
        ("first.py", "aside", True),
        ("third.py", "held", False),
    ]
    assert [x.does for x in found.stops] == ["Begin.", "", "", ""]
    assert (found.files, found.returns) == (3, 1)


def test_every_call_of_another_file_is_one_step(hook: Callable[[], object]):
    steps = walk.follow("example", hook).steps
    assert [x.function for x in steps] == ["hook", "twice", "aside", "twice", "deaf"]
    assert [x.returns for x in steps] == [False, False, True, True, False]


def test_nothing_is_followed_afterwards(hook: Callable[[], object]):
    before = sys.getprofile()
    walk.follow("example", hook)
    assert sys.getprofile() is before


def test_smoke(tmp_path: Path):
    """From the hook to its answer, with as many stops in the figures as in the text."""
    path = tmp_path / "walk.json"
    command = [sys.executable, str(COMMAND), "--smoke", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(COMMAND.parents[1])}
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (found,) = json.loads(path.read_text())["walks"]
    functions = [stop["function"] for stop in found["stops"]]
    assert functions[0] == "compute_mis_weights_with_cp" and functions[-1] == "_masks"
    assert {"correct", "token_stage", "Ragged.over_sequence", "diagnose"} <= set(functions)
    assert found["returns"] == sum(stop["returns"] for stop in found["stops"])
    counted = f"mis: {len(functions)} stops in {found['files']} files, {found['returns']} returns"
    assert ran.stdout.startswith(counted)
    document = path.with_suffix(".md").read_text()
    assert document.startswith("```\npython benchmarks/walk.py --smoke") and counted in document
