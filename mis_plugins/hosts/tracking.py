"""Numbers past the hook's answer, which a host averages, straight to where it logs: once an optimizer step."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mis_plugins.ragged import Ranks

logger = logging.getLogger("mis_plugins")

# Both have log(args, metrics, step_key), and read the step from the metrics.
TRACKING = ("miles.utils.tracking_utils.tracking", "slime.observability.logging_utils")
PREFIX, STEP_KEY = "train/mis_step/", "train/step"


def log(args: Any, metrics: Mapping[str, float], rollout_id: int, step_id: int) -> None:
    """To the tracking of the host that runs this process, beside its own `train/` metrics of that step; else the log.

    Call it on one rank, `reports`: on the others the hosts have not set their tracking up.
    """
    named = {PREFIX + name: value for name, value in metrics.items()}
    named[STEP_KEY] = rollout_id * steps_per_rollout(args) + step_id
    host = _tracking()
    if host is None:
        logger.info("rollout %d, step %d: %s", rollout_id, step_id, named)
        return
    host.log(args, named, step_key=STEP_KEY)


def reports(ranks: Ranks) -> bool:
    """Whether this is the rank on which both hosts set their tracking up, among those that hold log-probs."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    first_of_tensor = (
        mpu is None or not mpu.model_parallel_is_initialized() or mpu.get_tensor_model_parallel_rank() == 0
    )
    return first_of_tensor and all(group is None or group.rank() == 0 for group in (ranks.cp, ranks.dp))


def steps_per_rollout(args: Any) -> int:
    """As both hosts count their optimizer steps."""
    given = getattr(args, "num_steps_per_rollout", None)
    if given:
        return given
    samples = getattr(args, "rollout_batch_size", 1) * getattr(args, "n_samples_per_prompt", 1)
    return max(samples // (getattr(args, "global_batch_size", None) or samples), 1)


def _tracking() -> ModuleType | None:
    return next((sys.modules[name] for name in TRACKING if name in sys.modules), None)
