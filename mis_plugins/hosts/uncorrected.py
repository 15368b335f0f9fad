"""What the loss hook applies of a config, and runs that are not corrected: by choice, or for want of a hook.

A run that watches computes metrics, and its loss is the host's own. The loss hook needs no `--use-tis`, and the
argument is false by default, so that its value does not tell what the user wants. The hook looks for `use_tis: false`
in the config file that the host has read. A run does not get its correction where the host calls no hook of ours.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from mis_plugins.config import messages, reading
from mis_plugins.config.file import short
from mis_plugins.config.flat import spelled
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, OpsmConfig
from mis_plugins.config.view import View, of_hooks, view
from mis_plugins.errors import ConfigError, warn_once
from mis_plugins.hosts.host import LOSS_HOOK, Ranks
from mis_plugins.hosts.ownership import OURS
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


# A host's flag, whether it is set, and the fields of the objective that it decides.
IMPLIED: tuple[tuple[str, Callable[[Any], bool], dict[str, Any]], ...] = (
    (
        "--advantage-estimator gspo",
        lambda args: args.advantage_estimator == "gspo",
        {"surrogate": "clip", "ratio": "sequence"},
    ),
    ("--advantage-estimator cispo", lambda args: args.advantage_estimator == "cispo", {"surrogate": "cispo"}),
    ("--use-rollout-logprobs", lambda args: args.use_rollout_logprobs, {"old": "behavior"}),
    ("--use-unbiased-kl", lambda args: getattr(args, "use_unbiased_kl", False), {"unbiased_kl": True}),
)


def with_flags(args: Any, config: CorrectionConfig) -> CorrectionConfig:
    """The config with the objective and OPSM that the host's flags say where the user says none.

    Raises:
        ConfigError: a setting and a flag contradict each other; the error quotes both.
    """
    asked, opsm = config.objective, config.opsm
    objective = _objective(args, asked)
    if getattr(args, "use_opsm", False):
        if opsm is not None:
            raise ConfigError("--use-opsm and mis.opsm are both set; keep one of them")
        with spelled(delta="--opsm-delta"):
            opsm = OpsmConfig(reading.number(args.opsm_delta, "--opsm-delta"), reference=objective.old)
    try:
        return replace(config, objective=objective, opsm=opsm)
    except ConfigError as error:
        by_flag = args.use_rollout_logprobs and not asked
        implied = " (--use-rollout-logprobs means mis.objective.old: behavior)" if by_flag else ""
        raise ConfigError(error.template + implied).spelled(reading.spelling(args), "mis.") from None


def _objective(args: Any, asked: ObjectiveConfig | None) -> ObjectiveConfig:
    implied = [(flag, fields) for flag, is_set, fields in IMPLIED if is_set(args)]
    if asked is None:
        return ObjectiveConfig(**{name: value for _, fields in implied for name, value in fields.items()})
    for flag, fields in implied:
        for name, value in fields.items():
            if getattr(asked, name) != value:
                raise ConfigError(
                    f"mis.objective.{name}: {_yaml(getattr(asked, name))} contradicts {flag}, which means "
                    f"{name}: {_yaml(value)}; change one of them"
                )
    return asked


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    """Whether a flag or file of the user's says that a run only watches; raises ConfigError for an unreadable file."""
    return _reason(args) is not None


def _reason(args: Any) -> Reason | None:
    """Why the loss hook only watches; None where it corrects."""
    if getattr(args, "use_tis", False):
        return None
    if getattr(args, "get_mismatch_metrics", False):
        return MISMATCH_METRICS
    sources = chain([("a hook's config", of_hooks(view(args)))], _files(view(args)))
    where = next((name for name, keys in sources if keys.get("use_tis") is False), None)
    return None if where is None else Reason(f"use_tis: false in {where}", "say true there to correct, or drop it")


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


# ------------------------------------------------------------------------------------------- asked for and not done

STEP_HOOK = "--custom-megatron-before-train-step-hook-path mis_plugins.mis.report_step"


def asked_for(args: Any) -> CorrectionConfig | None:
    """The correction that the arguments of an actor ask us for; None for a critic, and for a run that watches.

    None too where another package's hook reads flat keys, which are Miles's own. It raises ConfigError where the
    arguments cannot be read.
    """
    given = view(args)
    is_critic = given.get("loss_type") == "value_loss" or given.get("trainer_role") == "critic"
    if is_critic or (given.get("mis") is None and _names_another_hook(given)):
        return None
    config = reading.from_args(given)
    corrects = config.corrects or config.needs_loss_hook
    return config if corrects and not watches(given) else None


def _names_another_hook(args: View) -> bool:
    """Whether the hook that the host calls with this loss is another package's."""
    by_loss = args.get("loss_type") == "custom_loss"
    path = args.get("custom_loss_function_path" if by_loss else "custom_tis_function_path")
    return bool(path) and not str(path).startswith(OURS)


def warn_of_one_sequence(config: CorrectionConfig, sequences: int, ranks: Ranks) -> None:
    """Warn where a weight is divided by the mean of itself alone, which leaves 1."""
    weight = config.weight
    if weight is None or weight.normalize is None or weight.level == "token" or sequences > 1:
        return
    scope, turn = weight.normalize.scope, " and one turn" if weight.by_segment else ""
    if scope == "micro_batch" or (scope == "data_parallel" and ranks.dp is None):
        warn_once(
            f"mis.weight.normalize.scope: {scope} (tis_batch_normalize) in a micro-batch of one sequence{turn} divides "
            "its weight by itself, which leaves 1: nothing is corrected; use scope: rollout, leave normalize out, or "
            "let micro-batches hold more sequences"
        )


def check_step_hook(config: CorrectionConfig) -> None:
    """Refuse, or warn of, what the step hook alone can do, where the host has never called it."""
    if config.on_all_rejected == "raise":
        raise ConfigError(f"{{on_all_rejected}}: raise needs {STEP_HOOK}").spelled({}, "mis.")
    if config.reports_step:
        without = {"all": "the log has no more than with mis.metrics: full", "watch": "the log has five metrics alone"}
        warn_once(f"mis.metrics: {config.metrics} needs {STEP_HOOK}; without it {without[config.metrics]}")


def error_of(ended: str, args: Any) -> str:
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
