"""A Miles trainer before it builds its model: what can be seen is checked, the kernels are pinned, and that is written.

Whatever raises here keeps the trainer from starting.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from mis_plugins import mis
from mis_plugins.config import reading
from mis_plugins.hosts import loss as hosts_loss
from true_on_policy.contract.gpu import check_environment
from true_on_policy.errors import HostConfigError
from true_on_policy.flags.command import check_host
from true_on_policy.hosts.config import BitwiseConfig
from true_on_policy.kernels.pin import pin
from true_on_policy.observe import dumps

DUMP = "TRUE_ON_POLICY_DUMP"  # the variable that names the file
LOSS = "true_on_policy.hosts.policy_loss"
STEP_HOOK = "true_on_policy.hosts.report_step"

logger = logging.getLogger("true_on_policy")


def start(args: Any) -> None:
    """See `true_on_policy.hosts.miles_init`."""
    path = dump_path(args)
    dumps.remove(path)
    contract = check_host(args)
    check_environment(contract, os.environ)
    check_configs(args)
    pin(contract)
    written = dumps.dump(path, contract, args)
    if written == path:
        logger.info("pinned; see: python -m true_on_policy doctor --trainer-dump %s", path)


def check_configs(args: Any) -> None:
    """The keys `bitwise:` and `mis:`, which would otherwise be read after the first rollout.

    Raises:
        HostConfigError, ConfigError: it quotes the key or the flag.
    """
    config = BitwiseConfig.from_args(args)
    for name in ("loss", "step_hook"):
        config.hook(name)
    compares = getattr(args, "custom_loss_function_path", None) == LOSS
    if not compares:
        logger.warning("log-probs are not compared: no --custom-loss-function-path %s", LOSS)
    _check_step_hook(args, config, compares)
    _check_mis(args, config)


def _check_step_hook(args: Any, config: BitwiseConfig, compares: bool) -> None:
    """On Megatron it stops all ranks together; Miles calls none on FSDP, where a rank stops alone."""
    flag = "--custom-megatron-before-train-step-hook-path"
    step_hook = getattr(args, "custom_megatron_before_train_step_hook_path", None)
    if args.train_backend == "fsdp":
        if step_hook or config.step_hook:
            logger.warning(
                "without effect on FSDP, where Miles calls no such hook: %s, bitwise.step_hook", flag
            )
    elif compares and config.on_difference == "raise" and step_hook != STEP_HOOK:
        raise HostConfigError(
            f"bitwise.on_difference: raise needs {flag} {STEP_HOOK}, with which all ranks stop together"
        )


def _check_mis(args: Any, config: BitwiseConfig) -> None:
    """Where a hook of ours is going to read it."""
    ours = lambda path: path is not None and path.startswith("mis_plugins.")  # noqa: E731
    asked = getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False)
    if asked and ours(getattr(args, "custom_tis_function_path", None)):
        mis.config_in_force(args)
    if ours(config.loss):
        hosts_loss.config_in_force(args, reading.from_args(args))


def dump_path(args: Any) -> Path:
    """Where the trainer's rank 0 writes: the file that TRUE_ON_POLICY_DUMP names, else beside the checkpoints."""
    save = Path(getattr(args, "save", None) or ".")
    return Path(os.environ.get(DUMP) or save / "true_on_policy" / "trainer.json")
