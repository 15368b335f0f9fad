"""Commands of this repository, in a process of their own, as a user runs them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ConfigCommand = Callable[..., Any]
"""The type of the fixture `config_command` of tests/conftest.py."""

ProofCommand = Callable[..., Any]
"""The type of the fixture `proof_command` of tests/conftest.py."""


def ran(
    *words: object, folder: Path = ROOT, given: str | None = None, seconds: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with these words, and with this checkout among what it imports.

    Args:
        given: what the command reads from its standard input.
        seconds: the limit of its time.
    """
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        input=given,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
