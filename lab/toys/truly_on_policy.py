"""What becomes of the demonstration's collapse where rollout and training are equal to the bit?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.toys import endings


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw the rewards of both runs, each with its mismatch in words: a KL of exactly 0 has no place on a log axis."""
    runs: Mapping[str, Mapping[str, Any]] = content["runs"]
    notes = {
        name: f"{run['equal']:,} of {run['tokens']:,} log-probs equal\nk3 {run['k3_kl']:.2g}"
        + (", exactly" if run["k3_kl"] == 0 else "")
        for name, run in runs.items()
    }
    endings.draw({name: [run] for name, run in runs.items()}, path, notes)
