"""What do the tests marked `gpu` say? They probe the real kernels of both contracts, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from lab.gpu.machine import Cuda
from lab.gpu.plan import Plan
from lab.gpu.receipt import Result
from mis_plugins.shared.provenance import REPOSITORY
from true_on_policy.errors import NotSeenError

SECONDS = 65  # less than what `sections` gives, so that this section itself ends the tests
FAILED = ("failure", "error")
Row = tuple[str, str, str]


def probes(plan: Plan, machine: Cuda) -> Iterator[Result]:
    rows = tuple(map(_row, _cases()))
    ended = {row[1] for row in rows}
    holds = "failed" not in ended if ended & {"passed", "failed"} else None
    yield Result("The tests marked gpu", ("test", "ended", "first difference"), rows, holds)


def _cases() -> list[ElementTree.Element]:
    """Run the tests, and read what pytest writes of each.

    Raises:
        NotSeenError: pytest wrote nothing.
    """
    with TemporaryDirectory() as folder:
        written = Path(folder, "tests.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={written}"]
        where = REPOSITORY / "tests" / "kernels" / "test_on_gpu.py"
        done = subprocess.run([*command, str(where)], stdout=sys.stderr, timeout=SECONDS, check=False)
        if not written.exists():
            raise NotSeenError(f"not seen: pytest ended with code {done.returncode} and wrote no results")
        return list(ElementTree.parse(written).iter("testcase"))


def _row(case: ElementTree.Element) -> Row:
    said = next((each for each in case if each.tag in (*FAILED, "skipped")), None)
    message = "" if said is None else said.get("message", "").partition("\n")[0]
    if said is None:
        return case.get("name", ""), "passed", ""
    if said.tag in FAILED:
        return case.get("name", ""), "failed", message
    return case.get("name", ""), f"skipped: {message}", ""
