"""How a host averages a hook's metrics: over rollouts or tokens of a step, fully masked samples included."""

from __future__ import annotations

from typing import Any

from mis_plugins.hosts.registry import of_package
from mis_plugins.hosts.rollout_store import ROLLOUT
from mis_plugins.metrics.token_metrics import Average

OF_USER = ("custom_generate_function_path", "custom_convert_samples_to_train_data_path")


def average(args: Any, step: tuple[int, int] | None = None) -> Average | None:
    """How the host averages, or the counted share of the step that trains; None where neither is known.

    A rollout may be several samples, whose number no hook is told. The samples of a rollout share one place
    in the average, so that a masked sample among them lowers nothing.

    Args:
        step: (rollout, step) that trains now, where the step hook said so.
    """
    counted = ROLLOUT.counted(args)
    share = None if counted is None else counted.share(step)
    return of_host(args) if share is None else share


def of_host(args: Any) -> Average | None:
    """How the host averages, as far as its arguments say; None where a rollout may be several samples."""
    if getattr(args, "calculate_per_token_loss", False):
        return "tokens"
    rollout = getattr(args, "rollout_function_path", None)
    one_sample = rollout is None or any(host.one_sample_a_rollout for host in of_package(rollout))
    return "sequences" if one_sample and all(getattr(args, name, None) is None for name in OF_USER) else None
