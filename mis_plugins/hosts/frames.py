"""Read local variables of a host's function that calls a hook, where the host does not hand them on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def held_by(*functions: tuple[str, str]) -> Mapping[str, Any]:
    """Local variables of the nearest caller among these functions; empty where the stack has none of them.

    Args:
        functions: the module of each function, and its name.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in functions:
            return frame.f_locals
        frame = frame.f_back
    return {}
