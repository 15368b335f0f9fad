"""The host that runs this process, for a hook that is handed nothing of it."""

from __future__ import annotations

import sys
from typing import Any

from mis_plugins.hosts import miles, slime
from mis_plugins.packing.ragged import Ranks


def ranks() -> Ranks:
    """The groups as they are now: Miles makes new ones when a rank is lost or replaced. Those of Megatron elsewhere."""
    state = miles_state()
    return slime.parallel()[0] if state is None else miles.parallel(state)[0]


def miles_state() -> Any | None:
    """The `parallel_state` of Miles as it is now; None where another host runs this process."""
    module = sys.modules.get("miles.backends.training_utils.parallel")
    return None if module is None else module.get_parallel_state()
