"""What a figure of these benchmarks was measured with."""

from __future__ import annotations

import sys
from pathlib import Path

from mis_plugins.local.provenance import as_markdown, measured_with

__all__ = ["as_markdown", "provenance"]

MEASURED = ("mis_plugins", "true_on_policy", "benchmarks", ":!mis_plugins/local", ":!benchmarks/results")


def provenance(checkouts: dict[str, Path] | None = None) -> dict[str, str]:
    """See `measured_with`; paths of the command are cut to their last part."""
    return measured_with(_command(), MEASURED, checkouts)


def _command() -> str:
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
