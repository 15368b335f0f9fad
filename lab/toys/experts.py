"""A mixture of experts: what correction, dropping by route, replay (R3) and truth on policy do to one recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.toys import endings


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each arm."""
    endings.draw(content["runs"], path)
