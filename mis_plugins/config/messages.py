"""Words of errors and warnings about a host's arguments: the keys that correct, and where a config was looked for.

A hook that corrects has no such error, and does not load this file.
"""

from __future__ import annotations

from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.file import keys_given, short
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import View, hooks_of, kind, view
from mis_plugins.errors import ConfigError

NOTHING = (
    "--use-tis is set but nothing says how to correct: pass a preset, for example "
    "--custom-config-path $(python -m mis_plugins config path tis); `config list --family start` has the others"
)

OTHERS = ("m2_threshold", "opsm", "objective", "center", "group_baseline")
"""Keys of `mis:` that change a loss, weight and rules aside."""


def correcting_keys(args: Any, config: CorrectionConfig) -> list[str]:
    """The user's names of what would change a loss: parts of `config`, and flat switches that are unread."""
    args = view(args)
    names = reading.spelling(args)
    nested = "mis.segment_wise" if config.weighs_by_segment_wise else "mis.weight"
    weighs = [names.get("weight", nested)] if config.weight else []
    rules = [key for key in ("use_rs", "use_mask", "rs_veto_threshold") if getattr(args, key, None)]
    rules = rules or ["mis.reject"] * bool(config.reject)
    others = [names.get(part, f"mis.{part}") for part in OTHERS if getattr(config, part) is not None]
    return weighs + rules + others


def needs_loss_hook(args: Any, config: CorrectionConfig) -> str:
    """What an error says of a config that the TIS hook cannot serve; `{field}` stands for what it lacks."""
    key = "opsm" if config.opsm else "objective" if config.objective else "segment_wise"
    unseen = "which version wrote a token" if key == "segment_wise" else "advantages and the target policy"
    flag = "--use-tis" if args.use_tis else "--get-mismatch-metrics, and to watch use_tis: false in the file"
    return (
        f"{{{key}}}: the TIS hook does not see {unseen}; pass --loss-type custom_loss --custom-loss-function-path "
        f"mis_plugins.mis.policy_loss in place of {flag}"
    )


def looked_at(args: View) -> str:
    """Where a config was looked for, and not found."""
    files = reading.files_of(args)
    places = [f"{kind(args)}: mis, {reading.FLAT_KEYS[0]} ... {reading.FLAT_KEYS[-1]}"]
    places += [f"the config beside {name}" for name in hooks_of(args)]
    places += [f"--{name.replace('_', '-')} {short(files[name])}, {_found_in(args, name)}" for name in files]
    return "; ".join(places if files else [*places, "no --custom-config-path is given"])


def _found_in(args: View, argument: str) -> str:
    try:
        keys = keys_given(reading.files_of(args)[argument])[0]
    except ConfigError as error:
        return str(error)
    if lost := reading.lost_of(args, keys):
        return f"which says {', '.join(lost)}, and the host has not made arguments of it"
    ours = [key for key, value in keys.items() if reading.is_read(key, value)]
    return f"which says {', '.join(ours) or 'none of them'}"
