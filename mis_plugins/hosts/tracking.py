"""Numbers past the hook's answer, which a host averages, straight to where it logs: once an optimizer step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mis_plugins.hosts import current, miles
from mis_plugins.metrics.metric import PREFIX, STEP_KEY
from mis_plugins.packing.ragged import Ranks

logger = logging.getLogger("mis_plugins")

# Both have log(args, metrics, step_key), and read the step from the metrics.
TRACKING = ("miles.utils.tracking_utils.tracking", "slime.observability.logging_utils")


def log(args: Any, metrics: Mapping[str, float], step: int) -> None:
    """To the tracking of the host that runs this process, beside its own `train/` metrics of that step, and to the log.

    Both, because the hosts do both: their tracking writes nothing where no tracker is switched on. Call it on one rank,
    `reports`: on the others the hosts have not set their tracking up.
    """
    named = {PREFIX + name: value for name, value in metrics.items()} | {STEP_KEY: step}
    host = _tracking()
    if host is not None:
        host.log(args, named, step_key=STEP_KEY)
    logger.info("step %d: %s", step, named)


def reports(ranks: Ranks) -> bool:
    """Whether this is the rank on which both hosts set their tracking up, among those that hold log-probs."""
    state = current.miles_state()
    if state is not None:
        return miles.is_first(state)
    mpu = sys.modules.get("megatron.core.parallel_state")
    first_of_tensor = (
        mpu is None or not mpu.model_parallel_is_initialized() or mpu.get_tensor_model_parallel_rank() == 0
    )
    return first_of_tensor and all(group is None or group.rank() == 0 for group in (ranks.cp, ranks.dp))


def steps_per_rollout(args: Any) -> int:
    """How many optimizer steps the host's arguments promise for each rollout."""
    if getattr(args, "use_dynamic_global_batch_size", False):
        return 1  # Miles makes one batch of all samples that a rollout returned.
    given = getattr(args, "num_steps_per_rollout", None)
    if given:
        return given
    samples = getattr(args, "rollout_batch_size", 1) * getattr(args, "n_samples_per_prompt", 1)
    return max(samples // (getattr(args, "global_batch_size", None) or samples), 1)


def _tracking() -> ModuleType | None:
    return next((sys.modules[name] for name in TRACKING if name in sys.modules), None)
