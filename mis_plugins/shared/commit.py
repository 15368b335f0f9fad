"""Which commit of a checkout ran, for certificates and figures."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

UNKNOWN = "unknown"
REPOSITORY = Path(__file__).resolve().parents[2]


def commit(checkout: Path = REPOSITORY, paths: Sequence[str] = ("true_on_policy", "constraints.txt")) -> str:
    """The commit's first twelve digits, with `(modified)` where a tracked file of `paths` differs.

    The answer is `unknown` outside a checkout.
    """
    # An installed package may lie in the checkout of some other project, whose commit says nothing of ours.
    if Path(git(checkout, "rev-parse", "--show-toplevel") or "/").resolve() != checkout.resolve():
        return UNKNOWN
    changed = git(checkout, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return git(checkout, "rev-parse", "HEAD")[:12] + (" (modified)" if changed else "")


def git(checkout: Path, *words: str) -> str:
    """What git prints for a command in a checkout; empty where there is no git, or no repository."""
    command = ["git", "-C", str(checkout), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
