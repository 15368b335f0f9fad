"""A host's log: its tracker, which is told metrics once an optimizer step, and its averages of what hooks return."""

from collections.abc import Mapping
from typing import Any

from mis_plugins.config.view import original
from mis_plugins.errors import logger
from mis_plugins.hosts.registry import current, of_package
from mis_plugins.hosts.rollout_store import ROLLOUT
from mis_plugins.metrics.alarms import PREFIX, STEP_KEY
from mis_plugins.metrics.token_metrics import Average


def log(args: Any, metrics: Mapping[str, float], step: int) -> None:
    """Log metrics to the running host's tracker, beside its `train/` metrics of the step, and to the log.

    The hosts do both too: their tracking writes nothing where no tracker is switched on. Call it only on the
    rank for which `Host.reports` holds: on the other ranks the hosts have not set their tracking up.
    """
    named = {PREFIX + name: value for name, value in metrics.items()} | {STEP_KEY: step}
    log_to_tracker = current(args).tracking()
    if log_to_tracker is not None:
        log_to_tracker(original(args), named, step_key=STEP_KEY)
    logger.info("step %d: %s", step, named)


def number_of(args: Any, rollout_id: int, step_id: int) -> int:
    """The host's number of an optimizer step, as far as its arguments tell."""
    return rollout_id * steps_per_rollout(args) + step_id


def steps_per_rollout(args: Any) -> int:
    """How many optimizer steps the host's arguments promise for each rollout."""
    if getattr(args, "use_dynamic_global_batch_size", False):
        return 1  # Miles makes one batch of all samples that a rollout returned.
    given = getattr(args, "num_steps_per_rollout", None)
    if given:
        return given
    samples = getattr(args, "rollout_batch_size", 1) * getattr(args, "n_samples_per_prompt", 1)
    return max(samples // (getattr(args, "global_batch_size", None) or samples), 1)


OF_USER = ("custom_generate_function_path", "custom_convert_samples_to_train_data_path")


def average(args: Any, step: tuple[int, int] | None = None) -> Average | None:
    """How the host averages, or the counted share of the step that trains; None where neither is known.

    A rollout may be several samples, whose number no hook is told. The samples of a rollout share one place in the
    average, so that a masked sample among them lowers nothing. `step` is the (rollout, step) that trains now, where the
    step hook said so.
    """
    counted = ROLLOUT.counted(args)
    share = None if counted is None else counted.share(step)
    return average_of_host(args) if share is None else share


def average_of_host(args: Any) -> Average | None:
    """How the host averages, as far as its arguments say; None where a rollout may be several samples."""
    if getattr(args, "calculate_per_token_loss", False):
        return "tokens"
    rollout = getattr(args, "rollout_function_path", None)
    one_sample = rollout is None or any(host.one_sample_a_rollout for host in of_package(rollout))
    return "sequences" if one_sample and all(getattr(args, name, None) is None for name in OF_USER) else None
