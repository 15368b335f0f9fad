"""The rollout batch of a rollout-data hook: handed over, or read from the hook's caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mis_plugins.errors import InputError
from mis_plugins.hosts.needs.miles import NEEDS as MILES


def rollout_data(handed: Sequence[Any], what: str, instead: str) -> tuple[int, Mapping[str, Any]]:
    """The rollout's number and batch: what a host hands the hook behind `args`, or what Miles's trainer holds.

    Raises:
        InputError: there is no rollout batch; the message says what needs one, and what to do instead.
    """
    if len(handed) == 2:
        return handed[0], handed[1]
    # Miles calls the hook with `args` alone; the batch is a local variable of the caller.
    held = {} if handed else MILES.train_actor.frame()
    if {"rollout_id", "rollout_data"} <= held.keys():
        return held["rollout_id"], held["rollout_data"]
    lacking = (
        "(args, samples), and samples hold no trainer log-probs"
        if handed
        else "args alone, and not from Miles's train_actor, where the batch could be read"
    )
    raise InputError(
        f"{what} needs the rollout batch, (args, rollout_id, rollout_data), and this "
        f"host calls --rollout-data-postprocess-path with {lacking}; {instead}"
    )
