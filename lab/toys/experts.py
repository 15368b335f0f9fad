"""A mixture of experts: what correction, dropping by route, replay (R3) and truth on policy do to one recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.toys import endings

WORDS = {
    "uncorrected": "no correction",
    "token TIS": "token weights up to 2",
    "route": "token TIS, and tokens of another route dropped",
    "R3": "the engine's routes replayed",
    "R3 + TIS": "routes replayed, and token TIS",
    "truly on policy": "an engine in fp32 on the trainer's kernels",
    "blog 1": "Miles blog, MoE 1: TIS up to 2, window, normalized",
    "blog 2": "Miles blog, MoE 2: TIS up to 1.5, window, normalized",
    "blog 3": "Miles blog, MoE 3: TIS up to 1.5, window",
    "blog 4": "Miles blog, MoE 4: TIS up to 1.5",
}
"""What each arm of the recipe does about the mismatch."""


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each arm."""
    endings.draw(content["runs"], path, WORDS)
