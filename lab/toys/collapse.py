"""Does correction help, when, and by how much? Every method, both advantages, several seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.toys import endings


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw the runs of the advantage R - 1, a panel for each method."""
    endings.draw(content["runs"]["R-1"], path)
