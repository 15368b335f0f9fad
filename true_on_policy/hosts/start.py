"""Prepare a host's trainer before it builds its model: check its settings, pin the kernels, write a dump.

Any exception here keeps the trainer from starting.
"""

import logging
import os
from pathlib import Path
from typing import Any

from mis_plugins import mis
from mis_plugins.config import reading
from mis_plugins.config.view import view
from mis_plugins.hosts.registry import current
from true_on_policy.contract.gpu import check_environment
from true_on_policy.errors import HostConfigError
from true_on_policy.flags.command import check_host
from true_on_policy.hosts.config import BitwiseConfig
from true_on_policy.kernels.pin import pin
from true_on_policy.observe import dumps

DUMP = "TRUE_ON_POLICY_DUMP"  # the variable that names the file of the dump
LOSS = "true_on_policy.hosts.policy_loss"
STEP_HOOK = "true_on_policy.hosts.report_step"

logger = logging.getLogger("true_on_policy")


def start(args: Any) -> None:
    """Check the settings, pin the kernels and write the dump."""
    args = view(args)
    path = dump_path(args)
    dumps.remove(path)
    contract = check_host(args)
    check_environment(contract, os.environ)
    check_configs(args)
    pin(contract)
    if dumps.dump(path, contract, args) == path:
        logger.info("pinned; see: python -m true_on_policy doctor --trainer-dump %s", path)


def check_configs(args: Any) -> None:
    """Check the keys `bitwise:` and `mis:` now, because the hooks read them only after the first rollout.

    Raises:
        HostConfigError, ConfigError: a setting cannot work; the message quotes the key or the flag.
    """
    args = view(args)
    config = BitwiseConfig.from_args(args)
    for name in ("loss", "step_hook"):
        config.hook(name)
    compares = (args.get("loss_type"), args.get("custom_loss_function_path")) == ("custom_loss", LOSS)
    if not compares:
        logger.warning("log-probs are not compared: no --loss-type custom_loss --custom-loss-function-path %s", LOSS)
    _check_step_hook(args, config, compares)
    _check_mis(args, config)


def _check_step_hook(args: Any, config: BitwiseConfig, compares: bool) -> None:
    """Check that the step hook is set where it must stop all ranks together; on FSDP, Miles calls no step hook."""
    flag = "--custom-megatron-before-train-step-hook-path"
    step_hook = getattr(args, "custom_megatron_before_train_step_hook_path", None)
    if not current(args).step_hook:
        if step_hook or config.step_hook:
            logger.warning("without effect on FSDP, which calls no such hook: %s, bitwise.step_hook", flag)
    elif compares and config.on_difference == "raise" and step_hook != STEP_HOOK:
        raise HostConfigError(
            f"bitwise.on_difference: raise needs {flag} {STEP_HOOK}, with which all ranks stop together"
        )


def _check_mis(args: Any, config: BitwiseConfig) -> None:
    """Check the key `mis:` where a hook of mis_plugins is going to read it."""
    ours = lambda path: path is not None and path.startswith("mis_plugins.")  # noqa: E731
    asked = getattr(args, "use_tis", False) or getattr(args, "get_mismatch_metrics", False)
    if asked and ours(getattr(args, "custom_tis_function_path", None)):
        mis.config_in_force(args)
    if ours(config.loss):
        from mis_plugins.hosts import loss_hook  # and the adapters of all hosts, which nothing else here needs

        loss_hook.config_in_force(args, reading.from_args(args), current(args))


def dump_path(args: Any) -> Path:
    """Return the file of rank 0's dump: the one that TRUE_ON_POLICY_DUMP names, else one beside the checkpoints."""
    save = Path(getattr(args, "save", None) or ".")
    return Path(os.environ.get(DUMP) or save / "true_on_policy" / "trainer.json")
