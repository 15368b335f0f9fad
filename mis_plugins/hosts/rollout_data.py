"""Read the rollout batch or the trainer from a hook's caller, where the host does not hand them on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mis_plugins.errors import InputError

# Miles 31f1ca9 calls `--rollout-data-postprocess-path` with `args` alone, in line 564 of its trainer; the batch is a
# local variable there.
TRAINER = "miles.backends.megatron_utils.actor"
CALLER = (TRAINER, "train_actor")


def rollout_data(handed: Sequence[Any], what: str, instead: str) -> tuple[int, Mapping[str, Any]]:
    """The rollout's number and batch: what a host hands the hook behind `args`, or what Miles's trainer holds.

    Raises:
        InputError: there is no rollout batch; the message says what needs one, and what to do instead.
    """
    if len(handed) == 2:
        return handed[0], handed[1]
    held = {} if handed else held_by(*CALLER)
    if {"rollout_id", "rollout_data"} <= held.keys():
        return held["rollout_id"], held["rollout_data"]
    lacking = (
        "(args, samples), and samples hold no trainer log-probs"
        if handed
        else f"args alone, and not from Miles's {CALLER[1]}, where the batch could be read"
    )
    raise InputError(
        f"{what} needs the rollout batch, (args, rollout_id, rollout_data), and this "
        f"host calls --rollout-data-postprocess-path with {lacking}; {instead}"
    )


def held_by(module: str, function: str) -> Mapping[str, Any]:
    """Local variables of a host's function further up the call stack; empty where the stack lacks it."""
    frame = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == (module, function):
            return frame.f_locals
        frame = frame.f_back
    return {}
