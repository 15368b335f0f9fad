"""Whether a run only watches: metrics are computed, and the loss is the host's own.

The loss hook needs no `--use-tis`, and the argument is false by default, so that its value does not tell what
the user wants. The hook looks for `use_tis: false` in the config file that the host has read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mis_plugins.config import messages, reading
from mis_plugins.config.file import short
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View, of_hooks, view
from mis_plugins.errors import ConfigError, warn_once
from mis_plugins.hosts.registry import current


@dataclass(frozen=True)
class Reason:
    """Why a run only watches, and what the user changes to have it correct."""

    what: str
    way_out: str


WITHOUT_USE_TIS = Reason("--use-tis is not set", "give --use-tis to correct")
MISMATCH_METRICS = Reason("--get-mismatch-metrics without --use-tis", "give --use-tis to correct")


def metrics_alone(args: Any, config: CorrectionConfig, reason: Reason) -> CorrectionConfig:
    """A config that changes no loss, with the metrics of `config`; a warning names what does not act."""
    if idle := messages.correcting_keys(args, config):
        warn_once(
            f"{reason.what}: metrics only, nothing is weighed or rejected, whatever {', '.join(idle)} say; "
            f"{reason.way_out}"
        )
    elif config.metrics == "none":
        warn_once(
            "mis.metrics: none without --use-tis: nothing is weighed, rejected or reported; drop the hook, or ask for "
            "metrics"
        )
    return CorrectionConfig(metrics=config.metrics)


def for_loss_hook(args: Any, config: CorrectionConfig) -> CorrectionConfig:
    """The part of `config` that the loss hook applies: all of it, or its metrics alone.

    Raises:
        ConfigError: flat keys that nothing reads; a file that may say `use_tis: false` and cannot be read here.
    """
    asked = messages.correcting_keys(args, config)
    reason = _reason(args) if asked else None
    if reason is not None:
        return metrics_alone(args, config, reason)
    if config.corrects or config.needs_loss_hook:
        return config
    if idle := asked or _flat_keys(view(args)):
        raise ConfigError(f"{', '.join(idle)}: no effect without a tis_upper_bound; give one (mis.yaml has 2.0)")
    _warn_where_nothing_is_said(view(args))
    return config


def _flat_keys(args: View) -> list[str]:
    """The flat keys that the user's file says; a host's parser may have defaults for some of them."""
    given = {key for _, keys in _files(args) for key, value in keys.items() if value is not None}
    return sorted(given.intersection(reading.FLAT_KEYS))


WATCHERS = ("metrics", "resplit_every", "routing")  # keys of `mis:` that ask for no correction
BY_FLAG = ("get_mismatch_metrics", "use_rollout_logprobs", "use_opsm")  # what a run of the loss hook may be for


def _warn_where_nothing_is_said(args: View) -> None:
    """Warn that the loss hook weighs and rejects nothing, in a run that asks neither to watch nor for another cure."""
    asked = args.get("mis")
    watches_only = isinstance(asked, Mapping) and not asked.keys().isdisjoint(WATCHERS)
    if watches_only or any(args.get(flag) for flag in BY_FLAG):
        return
    warn_once(
        "mis_plugins.mis.policy_loss weighs and rejects nothing, since nothing says how to correct (looked for in: "
        f"{messages.looked_at(args)}); pass a preset of `python -m mis_plugins config list`, or to watch "
        "`mis: {metrics: watch}`"
    )


def watches(args: Any) -> bool:
    """Whether the user says that a run with a config only watches, by a flag or in a file.

    Raises:
        ConfigError: this node cannot read the file.
    """
    return _reason(args) is not None


def _reason(args: Any) -> Reason | None:
    """Why the loss hook only watches; None where it corrects."""
    if getattr(args, "use_tis", False):
        return None
    if getattr(args, "get_mismatch_metrics", False):
        return MISMATCH_METRICS
    if of_hooks(view(args)).get("use_tis") is False:
        return Reason("use_tis: false in a hook's config", "say true there to correct, or drop it")
    file = next((name for name, keys in _files(view(args)) if keys.get("use_tis") is False), None)
    if file is None:
        return None
    return Reason(f"use_tis: false in {file}", "say true there to correct, or drop it")


def _files(args: View) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files that a host has read into its arguments: the flag and path of each, and their keys."""
    read = (reading.FILES[0], *current(args).config_files)
    for argument, path in reading.files_of(args).items():
        if argument in read:
            name = f"--{argument.replace('_', '-')} {short(path)}"
            keys = _keys(args, argument, name)
            if argument == reading.FILES[0]:
                _check_unchanged(args, name, keys)
            yield name, keys


def _keys(args: View, argument: str, name: str) -> Mapping[str, Any]:
    try:
        return reading.keys_of_file(args, argument)
    except ConfigError as error:
        raise ConfigError(
            f"{name}: whether it says use_tis: false cannot be read by this worker ({error}); or give --use-tis, or "
            "say use_tis: true in the file, to correct, and --get-mismatch-metrics to watch"
        ) from error


def _check_unchanged(args: View, name: str, keys: Mapping[str, Any]) -> None:
    """Refuse a file that no longer says what the job was started with."""
    for key in reading.differing(args, keys):
        raise ConfigError(
            f"{name}: {key} has changed since the job read the file, so that nobody knows whether it said use_tis: "
            "false; leave the file of a starting job alone"
        )
