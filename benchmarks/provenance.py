"""Describe what a figure of these benchmarks was measured with."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from pathlib import Path

from mis_plugins.shared.provenance import as_given, as_markdown, measured_with

__all__ = ["as_markdown", "provenance", "target"]

MEASURED = ("mis_plugins", "true_on_policy", "benchmarks", ":!mis_plugins/local", ":!benchmarks/results")


def provenance(checkouts: dict[str, Path] | None = None) -> dict[str, str]:
    """Describe this run by `measured_with`, for the code that the benchmarks measure."""
    command = as_given(f"python benchmarks/{Path(sys.argv[0]).name}", sys.argv[1:])
    return measured_with(command, MEASURED, checkouts)


def target(text: str) -> Path:
    """Parse the file for the figures, and refuse one that cannot be written before minutes are spent."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written; name a file in a folder that is there")
    return path
