"""Where `mis.denominator: kept` can be had: a host divides a sequence's loss by its original number of tokens."""

from __future__ import annotations

from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.notices import warn_once

REDUCER = "mis_plugins.mis.kept_token_mean"


def warn_where_kept(args: Any) -> None:
    """Say where a host may divide by the kept tokens itself, though the config says `original`."""
    if getattr(args, "custom_convert_samples_to_train_data_path", None) is not None:
        warn_once(
            "mis.denominator: original: Miles divides by the kept tokens all the same where its batch lacks "
            "rollout_mask_sums: hand them on from --custom-convert-samples-to-train-data-path"
        )


def check_reducer(args: Any, drops: bool) -> None:
    """Refuse our reducer beside the loss hook where something is dropped: it would divide by all valid tokens.

    Raises:
        ConfigError: it quotes the host's flag.
    """
    if drops and getattr(args, "custom_pg_loss_reducer_function_path", None) == REDUCER:
        raise ConfigError(
            f"--custom-pg-loss-reducer-function-path {REDUCER}: mis_plugins.mis.policy_loss hands a reducer the masks "
            "of before rejection, and it would divide by all their tokens; drop it, and say mis.denominator: kept"
        )


def check(args: Any) -> None:
    """Refuse `kept` where the host's own division would undo it, or another hook's would do it twice.

    Raises:
        ConfigError: it quotes the host's flag.
    """
    if getattr(args, "calculate_per_token_loss", False):
        raise ConfigError(
            "mis.denominator: kept divides each sequence by its kept tokens, but --calculate-per-token-loss divides "
            "the whole step by a token count that no hook can change; drop the flag, or use original"
        )
    reducer = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if reducer == REDUCER:
        raise ConfigError(
            f"mis.denominator: kept and --custom-pg-loss-reducer-function-path {REDUCER} both divide by the kept "
            "tokens; keep one of them"
        )
    if reducer is not None:
        raise ConfigError(
            f"mis.denominator: kept promises a division that --custom-pg-loss-reducer-function-path {reducer} "
            "replaces; drop one of them"
        )
    if getattr(args, "custom_convert_samples_to_train_data_path", None) is not None:
        raise ConfigError(
            "mis.denominator: kept: behind --custom-convert-samples-to-train-data-path a host may lack "
            "rollout_mask_sums, and then divides by the kept tokens itself; use original"
        )
