"""Errors and warnings about the keys of a host's arguments: which keys correct, and what a misspelled key may mean.

A hook that corrects loads this file only where a config has keys that are not ours. An argument that a host's recorded
parser knows is the host's own. The records lie in `hosts/records/`. Their first lines name what each was made from:
`lab/host_arguments.py` and a checkout, or single files of a host where no checkout can be had.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mis_plugins.config import reading
from mis_plugins.config.file import OURS as BESIDE
from mis_plugins.config.file import SWITCHES, keys_given, short
from mis_plugins.config.model import CorrectionConfig, RejectRule, WeightConfig
from mis_plugins.config.reading import FLAT_KEYS, HOST_KEYS, READ_KEYS, is_ours, suggest
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


COMMON_WORDS = frozenset({"level", "mode", "mask", "clip"})  # of PREFIXLESS; a user's own key may be one of them
PREFIXES = ("tis_", "rs_", "use_")
PREFIXED = (*FLAT_KEYS, *HOST_KEYS, "use_tis")
PREFIXLESS: dict[str, list[str]] = {
    key.removeprefix(prefix): [other for other in PREFIXED if other.endswith(key.removeprefix(prefix))]
    for key in PREFIXED
    for prefix in PREFIXES
    if key.startswith(prefix)
}
BELOW = {
    field.name: part
    for part, kind in (("reject", RejectRule), ("weight", WeightConfig))
    for field in dataclasses.fields(kind)
}  # parts of `mis:` by the keys that stand in them
WEIGHING = ("mis", "mis.weight", "mis.segment_wise")  # where somebody may ask for weights by the target policy
BY_TARGET = (
    "target is refused: the surrogate holds pi_theta / pi_old already, and a weight of pi_theta / mu would make it "
    "pi_theta^2 / (pi_old mu). Drop the key: the weight is pi_old / mu, and both multiply to pi_theta / mu"
)
SWITCH_KEYS = tuple(key for key in (*FLAT_KEYS, "use_tis") if key.startswith("use_"))


@cache  # a host asks for each micro-batch, and a file may hold a hundred of its own keys
def check(names: tuple[str, ...]) -> None:
    """Refuse a key that looks like ours and is not."""
    for name in names:
        if is_ours(name) and name not in READ_KEYS:
            raise ConfigError(f"{name}: unknown key{suggest(name, _family(name))}")
        if meant := _meant(name, names):
            raise ConfigError(f"{name}: nobody reads this key; write {meant}")


def unknown(path: str, key: str, value: Any, names: Iterable[str]) -> str:
    """What an error says of a key under `mis:` that is none of the known ones; `path` is where it stands."""
    by_target = key == "reference" and value == "target" and path in WEIGHING
    return f"{path}.{key}: {BY_TARGET if by_target else f'unknown key{suggest(key, names)}'}"


def _family(name: str) -> tuple[str, ...]:
    """The keys of ours that a name may be meant for."""
    return SWITCH_KEYS if name.startswith("use_") else FLAT_KEYS


def _meant(name: str, names: Sequence[str]) -> str | None:
    """What a key of a file should be, where only letter case, dots or a missing prefix keep it from being ours.

    Args:
        names: every key of the file; a word such as `level` may be a user's own where none of ours is beside it.
    """
    if name in READ_KEYS or name in recorded_names():
        return None
    parts = name.lower().replace("-", "_").split(".")
    plain = "_".join(parts)
    for key in (parts[-1], plain):
        if key in READ_KEYS or key in SWITCHES:
            return key if key != name else None
    if len(parts) > 1 and parts[0] == "mis":
        return _nested(parts[1:])
    if parts[0] in BESIDE:
        return _nested(parts)
    if plain in PREFIXLESS and (plain not in COMMON_WORDS or not set(FLAT_KEYS).isdisjoint(names)):
        return " or ".join(PREFIXLESS[plain])
    if plain in BELOW and "mis" in names:
        return _nested([BELOW[plain], plain])
    near = difflib.get_close_matches(plain, _family(plain), n=1, cutoff=0.8)
    if not (is_ours(plain) or (near and plain.startswith("use_"))):
        return None
    return near[0] if near else f"one of {', '.join(_family(plain))}"


def _nested(parts: Sequence[str]) -> str:
    """A key as it stands under `mis:`, from its path."""
    text = "..."
    for part in reversed(parts):
        text = f"{{{part}: [{text}]}}" if part == "reject" and text != "..." else f"{{{part}: {text}}}"
    return f"`mis: {text}`"


FOLDER = Path(__file__).parents[1] / "hosts" / "records"


def recorded_lines(record: str) -> list[str]:
    """The lines of a record: a name, what the host takes for it, and flags that are not just `--name`."""
    text = (FOLDER / f"{record}.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


@cache
def recorded_names() -> frozenset[str]:
    """Every recorded name, of all hosts."""
    return frozenset(line.split()[0] for file in FOLDER.glob("*.txt") for line in recorded_lines(file.stem) if line)
