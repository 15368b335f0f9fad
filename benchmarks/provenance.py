"""What a figure of these benchmarks was measured with."""

from __future__ import annotations

import sys
from pathlib import Path

from mis_plugins.local.provenance import as_given, as_markdown, measured_with

__all__ = ["as_markdown", "provenance"]

MEASURED = ("mis_plugins", "true_on_policy", "benchmarks", ":!mis_plugins/local", ":!benchmarks/results")


def provenance(checkouts: dict[str, Path] | None = None) -> dict[str, str]:
    """See `measured_with`."""
    command = as_given(f"python benchmarks/{Path(sys.argv[0]).name}", sys.argv[1:])
    return measured_with(command, MEASURED, checkouts)
