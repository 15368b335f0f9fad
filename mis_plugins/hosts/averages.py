"""What a host divides a hook's metrics by: all rollouts of the step, or all tokens, of fully masked samples as well."""

from __future__ import annotations

from typing import Any

from mis_plugins.hosts.registry import HOSTS
from mis_plugins.metrics.token_metrics import Average

OF_USER = ("custom_generate_function_path", "custom_convert_samples_to_train_data_path")


def average(args: Any) -> Average | None:
    """How the host averages; None where a rollout may be several samples, whose number no hook is told.

    Such samples share one place in the average, so that a masked one among them takes nothing away.
    """
    if getattr(args, "calculate_per_token_loss", False):
        return "tokens"
    rollout = getattr(args, "rollout_function_path", None)
    own = tuple(f"{host.package}." for host in HOSTS.values() if host.one_sample_a_rollout)
    one_sample = rollout is None or rollout.startswith(own)
    return "sequences" if one_sample and all(getattr(args, name, None) is None for name in OF_USER) else None
