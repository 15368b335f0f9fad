"""Checks of `mis.denominator` against the flags of a host, which itself divides each sequence's loss."""

from __future__ import annotations

from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import ConfigError
from mis_plugins.shared.notices import warn_once

REDUCER = "mis_plugins.mis.kept_token_mean"


def warn_where_kept(args: Any) -> None:
    """Warn where a host may divide by the kept tokens itself, though the config says `original`."""
    if getattr(args, "custom_convert_samples_to_train_data_path", None) is not None:
        warn_once(
            "mis.denominator: original: Miles divides by the kept tokens all the same where its batch lacks "
            "rollout_mask_sums: hand them on from --custom-convert-samples-to-train-data-path"
        )


def warn_of_other_terms(args: Any, config: CorrectionConfig, by_kept: bool) -> None:
    """Warn once of what `other_terms` finds."""
    found = other_terms(args, config, by_kept)
    if found is not None:
        warn_once(found)


def other_terms(args: Any, config: CorrectionConfig, by_kept: bool) -> str | None:
    """A warning where KL or entropy keep another denominator than the policy term; None elsewhere.

    Args:
        by_kept: whether the host itself divides every term by the kept tokens, as Miles on FSDP does.
    """
    flags = _other_terms(args)
    if not flags or not config.rejects or (config.denominator == "kept") == by_kept:
        return None
    if not reading.says_denominator(args):
        return None
    masks = getattr(args, "use_mask", None)  # the one flat key that says a denominator
    said = "use_mask: the denominator of all tokens" if masks else f"mis.denominator: {config.denominator}"
    theirs = "kept tokens" if by_kept else "tokens of before rejection"
    instead = (
        f"use {'use_rs' if masks else 'denominator: kept'}"
        if by_kept
        else "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss divides every term alike"
    )
    return (
        f"{said} is that of the policy term alone: the TIS hook is not handed the terms "
        f"of {' and '.join(flags)}, which the host divides by the {theirs}; {instead}"
    )


def _other_terms(args: Any) -> list[str]:
    """The flags that add a KL or entropy term to the host's loss."""
    entropy_coef = getattr(args, "entropy_coef", 0)
    flags = ["--use-kl-loss"] if getattr(args, "use_kl_loss", False) else []
    return flags + ([f"--entropy-coef {entropy_coef}"] if entropy_coef else [])


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


def check_masks(args: Any) -> None:
    """Refuse our reducer beside `use_mask`: it divides by the kept tokens, and `use_mask` by all of them.

    Raises:
        ConfigError: it quotes both.
    """
    reducer = getattr(args, "custom_pg_loss_reducer_function_path", None)
    if getattr(args, "use_mask", None) and reducer == REDUCER:
        raise ConfigError(
            "use_mask: true counts masked tokens in the denominator, and --custom-pg-loss-reducer-function-path "
            f"{REDUCER} divides by the kept tokens; drop the reducer, or say use_rs in place of use_mask"
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
