"""Runs that ask for what they do not get, since the host calls no hook of ours that corrects, or no step hook."""

from __future__ import annotations

from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View, view
from mis_plugins.errors import ConfigError, warn_once
from mis_plugins.hosts import watching
from mis_plugins.hosts.host import LOSS_HOOK, Ranks
from mis_plugins.hosts.registry import current

OF_SEQUENCES = ("sequence", "geometric")  # levels at which all tokens of a sequence share one weight
STEP_HOOK = "--custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step"
OURS = ("mis_plugins.", "true_on_policy.")


def asked_for(args: Any) -> CorrectionConfig | None:
    """The correction that the arguments of an actor ask us for; None for a critic, and for a run that watches.

    None too where another package's hook reads flat keys, which are Miles's own.

    Raises:
        ConfigError: the arguments cannot be read.
    """
    given = view(args)
    is_critic = given.get("loss_type") == "value_loss" or given.get("trainer_role") == "critic"
    if is_critic or (given.get("mis") is None and _names_another_hook(given)):
        return None
    config = reading.from_args(given)
    corrects = config.corrects or config.needs_loss_hook
    return config if corrects and not watching.watches(given) else None


def _names_another_hook(args: View) -> bool:
    """Whether the hook that the host calls with this loss is another package's."""
    by_loss = args.get("loss_type") == "custom_loss"
    path = args.get("custom_loss_function_path" if by_loss else "custom_tis_function_path")
    return bool(path) and not str(path).startswith(OURS)


def warn_of_one_sequence(config: CorrectionConfig, sequences: int, ranks: Ranks) -> None:
    """Warn where a weight is divided by the mean of itself alone, which leaves 1."""
    weight = config.weight
    if weight is None or weight.normalize is None or weight.level not in OF_SEQUENCES or sequences > 1:
        return
    scope = weight.normalize.scope
    if scope == "micro_batch" or (scope == "data_parallel" and ranks.dp is None):
        warn_once(
            f"mis.weight.normalize.scope: {scope} (tis_batch_normalize) in a micro-batch of one sequence divides its "
            "weight by itself, which leaves 1: nothing is corrected; use scope: rollout, leave normalize out, or let "
            "micro-batches hold more sequences"
        )


def check_step_hook(config: CorrectionConfig) -> None:
    """Refuse, or warn of, what the step hook alone can do, where the host has never called it."""
    if config.on_all_rejected == "raise":
        raise ConfigError(f"{{on_all_rejected}}: raise needs {STEP_HOOK}").spelled({}, "mis.")
    if config.reports_step:
        without = {"all": "there is no more than with mis.metrics: full", "watch": "the five of the TIS hook are all"}
        warn_once(f"mis.metrics: {config.metrics} needs {STEP_HOOK}; without it {without[config.metrics]}")


def told(ended: str, args: Any) -> str:
    """The error of a step or rollout that no hook of ours corrected, though the arguments ask for it."""
    return f"{ended}: the arguments ask for a correction, and no hook of mis_plugins corrected: {lacking(args)}"


def lacking(args: Any) -> str:
    """What to change so that a hook of ours corrects: the flags that are missing, or the hook that is not called."""
    given, config = view(args), asked_for(args)
    if config is None:
        return "see the logs of the ranks of the last pipeline stage"
    if given.get("loss_type") == "custom_loss":
        path = given.get("custom_loss_function_path")
        return f"give {LOSS_HOOK}" if path is None else f"{path} corrects nothing; give {LOSS_HOOK}"
    if config.needs_loss_hook:
        return f"give {LOSS_HOOK}"
    path = given.get("custom_tis_function_path")
    missing = ["--use-tis"] * (not given.get("use_tis"))
    missing += [f"--custom-tis-function-path {current(given).tis_hook}"] * (path is None)
    if missing:
        return f"give {' '.join(missing)}"
    return (
        f"the host does not call --custom-tis-function-path {path} with --loss-type {given.get('loss_type')}, or the "
        f"function calls no hook of ours; give --loss-type policy_loss, or {LOSS_HOOK}"
    )
