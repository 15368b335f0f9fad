"""Reading a config: a dict, a file's keys or a host's arguments, in either of two spellings.

The nested key `mis:` is strict: an unknown key, a wrong type, a bound that cannot hold or a setting without
effect is a `ConfigError` that quotes the user's key. Flat keys mean what they mean in Miles's `mis.yaml`
(`tis_level`, `rs_veto_threshold`, ...) or in AReaL (`behav_imp_weight_cap`, ...), and are refused only where
they cannot work.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from mis_plugins.config import recorded
from mis_plugins.config.file import OURS as BESIDE
from mis_plugins.config.file import SWITCHES, keys_given, short
from mis_plugins.config.model import (
    LEVEL_OVER,
    WEIGHT_BOUNDS,
    CorrectionConfig,
    Metrics,
    NormalizeConfig,
    ObjectiveConfig,
    RejectRule,
    SegmentWiseConfig,
    WeightConfig,
    check_ratio_bounds,
)
from mis_plugins.config.terms.bounds import BOUNDS
from mis_plugins.config.view import View, contradicted, hooks_of, is_untyped, kind, of_hooks, once, view
from mis_plugins.errors import ConfigError
from mis_plugins.shared.notices import warn_once
from mis_plugins.shared.numerals import shown

FLAT_KEYS = (
    "tis_level",
    "tis_mode",
    "tis_lower_bound",
    "tis_upper_bound",
    "tis_batch_normalize",
    "use_rs",
    "use_mask",
    "rs_level",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
)
AREAL_KEYS = (
    "enable_segment_wise_ppo",
    "behav_imp_weight_cap",
    "behav_imp_weight_floor",
    "use_decoupled_loss",
)  # `max_head_offpolicyness` bounds the rollout, and is the host's own
AREAL_BLOCKS = ("actor", "rollout")  # of AReaL's yaml, which hold its keys
HOST_KEYS = ("tis_clip", "tis_clip_low")  # the hosts' own flags of their built-in TIS
AREAL_PREFIXES = ("behav_imp_", "behave_imp_")
OUR_PREFIXES = ("tis_", "rs_", "mis_", *AREAL_PREFIXES)
READ_KEYS = frozenset((*FLAT_KEYS, *AREAL_KEYS, *HOST_KEYS, "mis", "use_tis", "rejection_sampling"))
OWN_KEYS = READ_KEYS - {"rejection_sampling"}  # a host's own key may have the name of AReaL's block
COMMON_WORDS = frozenset(
    {"level", "mode", "mask", "clip"}
)  # of PREFIXLESS; a user's own key may be one of them
PREFIXES = ("tis_", "rs_", "use_", "enable_", "behav_imp_", "behav_")
PREFIXED = (*FLAT_KEYS, *AREAL_KEYS, *HOST_KEYS, "use_tis")
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
RULE_KEYS = (
    "rs_level",
    "rs_lower_bound",
    "rs_upper_bound",
)  # of the rule that `use_rs` or `use_mask` switches on
OUR_SWITCHES = tuple(sorted(key for key in READ_KEYS if key.startswith("use_")))
HOSTS_SWITCHES = frozenset({"use_te"})  # arguments of the hosts within two edits of one of ours
MOST_ITEMS = 64  # of a list; each rule costs every step its time
LARGEST_FLOAT = 3.4028234663852886e38  # of 32 bits, in which the hooks compute
EDITS = 2  # a switch within this edit distance of one of ours counts as misspelled
FlatLevel = Literal["token", "sequence", "geometric"]
FlatMode = Literal["truncate", "clip", "mask"]


def from_mapping(mapping: Any) -> CorrectionConfig:
    """Read the nested spelling: the mapping under `mis:`.

    >>> from_mapping({"weight": {"upper": 3}, "reject": [{"over": "min", "lower": "1e-4"}]}).weight.upper
    3.0
    """
    if isinstance(mapping, Mapping):
        _check_said(mapping)
    return _parse(CorrectionConfig, {} if mapping is None else mapping, "mis")


def _check_said(mapping: Mapping[str, Any]) -> None:
    """Check which keys the user gave, before defaults take the place of missing ones."""
    weight, segment_wise = mapping.get("weight"), mapping.get("segment_wise")
    if "reject" in mapping and "weight" not in mapping and segment_wise is None:
        raise ConfigError(
            "mis.weight: missing beside mis.reject; say `weight: null` to reject without weighting"
        )
    if isinstance(weight, Mapping) and weight.get("upper", 0) is None:
        raise ConfigError("mis.weight.upper: got None; leave it out for 2, or say `bound: none` for no bound")
    if segment_wise is None or "weight" not in mapping:
        return
    if weight is None:
        raise ConfigError(
            "mis.weight: null contradicts mis.segment_wise, which is a weight; drop one of them"
        )
    if isinstance(segment_wise, Mapping):
        for name in WEIGHT_BOUNDS:
            if name in segment_wise:
                raise ConfigError(
                    f"mis.segment_wise.{name}: has no effect beside mis.weight, which has bounds; drop it"
                )


def from_flat(keys: Mapping[str, Any], metrics: Metrics = "full") -> CorrectionConfig:
    """Read Miles's flat keys, as its `mis.yaml` documents them, and `use_mask` of its blog.

    A veto needs no `use_rs` here. `use_rs` and `use_mask` both leave tokens outside the bounds without a
    gradient; `use_mask` counts them in the denominator on every host. As in Miles, a lower bound of 0 or
    below means none, and an unset one 1 / upper.
    """
    flat = {key: keys.get(key) for key in FLAT_KEYS}
    number = lambda key: _convert(float | None, flat[key], key)  # noqa: E731
    upper, veto = number("tis_upper_bound"), number("rs_veto_threshold")
    lower = _lower_bound(flat, "tis_lower_bound")
    if upper is None:
        raise ConfigError("tis_upper_bound: unset; every tis_mode needs it (mis.yaml has 2.0)")
    bound = _convert(FlatMode, flat["tis_mode"] or "truncate", "tis_mode")
    with _spelled(lower="tis_lower_bound", upper="tis_upper_bound"):
        check_ratio_bounds(lower or None, upper, unbounded="0")
    with _spelled(lower="tis_lower_bound", upper="tis_upper_bound", bound="tis_mode"):
        weight = WeightConfig(
            level=_convert(FlatLevel, flat["tis_level"] or "token", "tis_level"),
            bound=bound,
            lower=lower if BOUNDS[bound].has_floor else None,
            upper=upper,
            normalize=NormalizeConfig()
            if _convert(bool, flat["tis_batch_normalize"] or False, "tis_batch_normalize")
            else None,
        )
    rules = []
    if _drops_outside(flat):
        rules.append(_flat_rule(flat, lower, upper))
    if veto is not None:
        with _spelled(lower="rs_veto_threshold"):
            rules.append(RejectRule(over="min", lower=veto))
    return CorrectionConfig(weight, tuple(rules), metrics)


def _drops_outside(flat: Mapping[str, Any]) -> bool:
    """Whether `use_rs` or `use_mask` is on; they share their bounds, so that both at once contradict each other."""
    drops, masks = (_convert(bool, flat[key] or False, key) for key in ("use_rs", "use_mask"))
    if drops and masks:
        raise ConfigError(
            "use_rs and use_mask are both true: one leaves rejected tokens out of the average where the host can, the "
            "other counts them; keep one of them"
        )
    return drops or masks


def _flat_rule(flat: Mapping[str, Any], tis_lower: float | None, tis_upper: float) -> RejectRule:
    """`use_rs` or `use_mask`: bounds that are unset fall back to those of the weight, as in Miles."""
    lower = _lower_bound(flat, "rs_lower_bound")
    upper = _convert(float | None, flat["rs_upper_bound"], "rs_upper_bound")
    fallback = 1 / tis_upper if tis_lower is None else tis_lower
    with _spelled(
        lower="rs_lower_bound" if lower is not None else "rs_lower_bound (unset, from the tis_ bounds)",
        upper="rs_upper_bound" if upper is not None else "rs_upper_bound (unset, from tis_upper_bound)",
    ):
        bounds = (fallback if lower is None else lower) or None, tis_upper if upper is None else upper
        check_ratio_bounds(*bounds, unbounded="0")
        over = LEVEL_OVER[_convert(FlatLevel, flat["rs_level"] or "token", "rs_level")]
        return RejectRule(over=over, lower=bounds[0], upper=bounds[1])


def _lower_bound(flat: Mapping[str, Any], key: str) -> float | None:
    """A lower bound of a ratio, which is never below 0: whatever is below 0 bounds as little as 0 does."""
    bound = _convert(float | None, flat[key], key)
    return None if bound is None else max(bound, 0.0)


def from_areal(keys: Mapping[str, Any], metrics: Metrics = "watch") -> CorrectionConfig:
    """Read AReaL's flat keys: standard or segment-wise decoupled PPO; a token outside the bounds weighs 0.

    As in AReaL, no cap means no bound, and no floor means 0. `enable_segment_wise_ppo: true` takes AReaL's
    rules for fresh tokens, `behavior_at_age_0`, and for PPO's ratio, `clip_against: proximal`. Without the
    key the host decides, as without `mis.segment_wise`. `use_decoupled_loss: false` compares pi_theta with mu
    itself, and has no weight.
    """
    cap = _convert(float | None, keys.get("behav_imp_weight_cap"), "behav_imp_weight_cap")
    floor = _convert(float | None, keys.get("behav_imp_weight_floor"), "behav_imp_weight_floor")
    asked = _convert(bool | None, keys.get("enable_segment_wise_ppo"), "enable_segment_wise_ppo")
    decoupled = _convert(bool | None, keys.get("use_decoupled_loss"), "use_decoupled_loss")
    if decoupled is False:
        for name, value in (("behav_imp_weight_cap", cap), ("behav_imp_weight_floor", floor)):
            if value is not None:
                raise ConfigError(f"{name}: {value:g} has no effect with use_decoupled_loss: false; drop it")
        if asked:
            raise ConfigError("enable_segment_wise_ppo: true contradicts use_decoupled_loss: false")
        off = SegmentWiseConfig(enabled=False)
        return CorrectionConfig(metrics=metrics, objective=ObjectiveConfig(old="behavior"), segment_wise=off)
    if cap is None and floor is not None:
        raise ConfigError(
            f"behav_imp_weight_floor: {floor:g} alone is not served; give a behav_imp_weight_cap too"
        )
    with _spelled(lower="behav_imp_weight_floor", upper="behav_imp_weight_cap"):
        weight = (
            WeightConfig(bound="none") if cap is None else WeightConfig("token", "zero", floor or 0.0, cap)
        )
    # AReaL never scores what the current version wrote: such a token keeps the weight 1 that it starts with.
    areals = SegmentWiseConfig(fresh_tokens="behavior_at_age_0", clip_against="proximal")
    chosen = {None: None, False: SegmentWiseConfig(enabled=False), True: areals}
    return CorrectionConfig(weight, metrics=metrics, segment_wise=chosen[asked])


def areal_places(said: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """AReaL's keys that are set, at the top level or in its blocks: where each stands, and its value.

    Keys of a block that no one knows are among them, so that they are refused as at the top level.

    Raises:
        ConfigError: two places contradict each other.
    """
    blocks = {f"{name}.": said[name] for name in AREAL_BLOCKS if isinstance(said.get(name), Mapping)}
    found: dict[str, tuple[str, Any]] = {}
    for prefix, block in {"": said, **blocks}.items():
        for key, given in block.items():
            if given is None or not _of_areal(str(key)):
                continue
            place, value = found.setdefault(str(key), (f"{prefix}{key}", given))
            if value != given:
                raise ConfigError(
                    f"{prefix}{key}: {shown(given)} contradicts {place}: {shown(value)}; keep one of them"
                )
    _check_decoupled({key: value for key, (_, value) in found.items()}, {"": said, **blocks})
    return found


def areal_keys(said: Mapping[str, Any]) -> dict[str, Any]:
    """AReaL's keys with their values, wherever they stand; see `areal_places`."""
    return {key: value for key, (_, value) in areal_places(said).items()}


def _of_areal(key: str) -> bool:
    return key in (*AREAL_KEYS, "rejection_sampling") or key.startswith(AREAL_PREFIXES)


def _check_decoupled(found: Mapping[str, Any], blocks: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse what weighs nothing in AReaL: plain PPO on recomputed log-probs, and decoupled PPO without rejection."""
    bounds = found.keys() & {"rejection_sampling", "behav_imp_weight_cap"}
    null = any(block.get("rejection_sampling", 0) is None for block in blocks.values())
    if found.get("use_decoupled_loss") and null and not bounds:
        raise ConfigError(
            "rejection_sampling: null weighs nothing in AReaL, with use_decoupled_loss: true too; drop both keys, or "
            "say which tokens to reject"
        )
    recomputes = any(block.get("recompute_logprob") is True for block in blocks.values())
    if found.get("use_decoupled_loss") is False and recomputes:
        raise ConfigError(
            "use_decoupled_loss: false with recompute_logprob: true is PPO on recomputed log-probs, uncorrected: the "
            "hosts do that without a hook, so drop both keys"
        )


@functools.cache  # a host has a thousand arguments, and asks for each micro-batch
def is_ours(name: str) -> bool:
    """Whether an argument of a host, or a top-level key of a config file, is read here, or refused."""
    plain = name.replace("-", "_")  # as on a command line
    if plain in READ_KEYS:
        return True
    looks = plain.startswith(OUR_PREFIXES) or _resembles_a_switch(name)
    return looks and plain not in recorded.names()


def is_read(name: str, value: Any) -> bool:
    """Whether a top-level key with this value is read here, or refused: ours, or a block of AReaL's with its keys."""
    block = name in AREAL_BLOCKS and isinstance(value, Mapping)
    return is_ours(name) or (block and any(_of_areal(str(key)) for key in value))


def check_names(names: Iterable[str]) -> None:
    """Refuse a key that looks like ours and is not.

    Raises:
        ConfigError: it quotes the key, and suggests one.
    """
    names = list(names)
    for name in names:
        check_spelling_of_areal(name)
        if is_ours(name) and name not in READ_KEYS:
            raise ConfigError(f"{name}: unknown key{_suggest(name, _family(name))}")
        if meant := _meant(name, names):
            raise ConfigError(f"{name}: nobody reads this key; write {meant}")


def _family(name: str) -> tuple[str, ...]:
    """The keys of ours that a name may be meant for."""
    return {"use": OUR_SWITCHES, "beh": AREAL_KEYS}.get(name[:3], FLAT_KEYS)


def _meant(name: str, names: Sequence[str]) -> str | None:
    """What a key of a file should be, where only letter case, dots or a missing prefix keep it from being ours.

    Args:
        names: every key of the file; a word such as `level` may be a user's own where none of ours is beside it.
    """
    if name in READ_KEYS or name in recorded.names():
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
    if not is_ours(plain):
        return None
    near = difflib.get_close_matches(plain, _family(plain), n=1)
    return near[0] if near else f"one of {', '.join(_family(plain))}"


def _nested(parts: Sequence[str]) -> str:
    """A key as it stands under `mis:`, from its path."""
    text = "..."
    for part in reversed(parts):
        text = f"{{{part}: [{text}]}}" if part == "reject" and text != "..." else f"{{{part}: {text}}}"
    return f"`mis: {text}`"


def check_spelling_of_areal(name: str) -> None:
    """Refuse the keys of the releases of AReaL that spelled `behave`, whose weights are others than `behav_imp_*`.

    Raises:
        ConfigError: it tells what AReaL has had in place of the key since 1.0.
    """
    if name.startswith("behave_imp_"):
        raise ConfigError(
            f"{name}: AReaL itself has refused it since 1.0. Give `config from-areal` a rejection_sampling block: "
            "action: mask for the modes token_mask and sequence_mask, action: clamp for token_truncate and "
            "sequence_truncate, level: sequence for sequence_*, upper for the cap; with the mode disabled drop "
            "use_decoupled_loss too"
        )


def _resembles_a_switch(name: str) -> bool:
    """Whether a `use_*` that we do not read is at most two edits away from one that we do."""
    plain = name.replace("-", "_")
    if not plain.startswith("use_") or plain in HOSTS_SWITCHES or name in READ_KEYS:
        return False
    near = (ours for ours in OUR_SWITCHES if abs(len(plain) - len(ours)) <= EDITS)
    return any(_edits(plain, ours) <= EDITS for ours in near)


def _edits(first: str, second: str) -> int:
    """The Levenshtein distance: how many letters to insert, drop or replace."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        above, row = row, [i]
        for j, b in enumerate(second, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def from_args(args: Any) -> CorrectionConfig:
    """The config that a host's arguments carry, in one of its spellings.

    Raises:
        ConfigError: a key of the user's that looks like ours and is not; two spellings at once; `--use-tis` with no
            config.
    """
    return once(view(args), _from_view)


def _from_view(stated: View) -> CorrectionConfig:
    said = {name: value for name, value in stated.items() if is_ours(name)}
    for name in said.keys() - OWN_KEYS:
        if _is_the_hosts(stated, name):
            del said[name]
    said |= {key: value for key, value in areal_keys(stated).items() if key in said or key not in stated}
    if not is_untyped(stated):  # an attribute of the class, or a property, is an argument too
        others = {name: getattr(stated, name, None) for name in OWN_KEYS - said.keys()}
        said |= {name: value for name, value in others.items() if value is not None}
    if beside := of_hooks(stated).keys() & BESIDE:
        raise ConfigError(f"{min(beside)}: stands beside `mis:` in a hook's config; write it under `mis:`")
    _check_one_value(stated)
    for keys in _keys_of_readable_files(stated):
        check_names(keys)
    said = {name: plain(value) for name, value in said.items()}
    key = repr(said)
    if key not in _READ_BEFORE:
        _READ_BEFORE[key] = _of_said(said)
    config = _READ_BEFORE[key]
    corrects = config.corrects or config.needs_loss_hook
    if not corrects and getattr(stated, "use_tis", False):
        raise ConfigError(f"{NOTHING_SAID} (looked for in: {looked_at(stated)})")
    if FILES[0] in files_of(stated):
        _check_handed_on(stated, corrects)
    return config


def _check_one_value(args: View) -> None:
    """Refuse a key of ours to which the configs of two hooks give two values."""
    for name in filter(is_ours, contradicted(args)):
        raise ConfigError(f"{name}: two hooks' configs give it two values; say it in one of them")


def _check_handed_on(args: View, corrects: bool) -> None:
    """Refuse arguments that lack what the user's file says: the run would be corrected by a part of it, or not at all.

    Raises:
        ConfigError: the host made no argument of a key; the file cannot be read, and nothing corrects without it; the
            file says what no config may.
    """
    name = f"--custom-config-path {short(str(args[FILES[0]]))}"
    try:
        keys = keys_of_file(args, FILES[0])
    except ConfigError as error:
        if corrects and isinstance(error.__cause__, OSError):
            return  # a file that is gone since the job read it
        raise
    if lost := _lost(args, keys):
        raise ConfigError(f"{name} says {', '.join(lost)}, and the host has not made arguments of it")
    differs = [key for key, value in keys.items() if is_read(key, value) and not equal(args.get(key), value)]
    if differs and not corrects:
        raise ConfigError(
            f"{name} says another {', '.join(differs)} than the arguments, with which nothing corrects"
        )
    if differs := [key for key in differs if key not in HOST_KEYS]:
        warn_once(
            f"{name} says another {', '.join(differs)} than the job's arguments, which hold: the file has changed "
            "since the job read it, or the host has put another value in its place"
        )


def _lost(args: View, keys: Mapping[str, Any]) -> list[str]:
    """The keys of a file that are read here, and that the arguments lack."""
    said = [key for key, value in keys.items() if value is not None and is_read(key, value)]
    lost = [key for key in said if key != "use_tis" and args.get(key) is None]
    return lost + ["use_tis: true"] * bool(keys.get("use_tis") and not getattr(args, "use_tis", False))


def plain(value: Any) -> Any:
    """A value of a config in the types of YAML, whatever mapping or sequence a host has made of it."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def equal(one: Any, other: Any) -> bool:
    """Whether two values of a config say one thing: YAML leaves `2e1` a text, and a typed host makes a number of it."""
    one, other = plain(one), plain(other)
    if isinstance(one, str) != isinstance(other, str):
        with suppress(TypeError, ValueError):
            return float(one) == float(other)
    return bool(one == other)


NOTHING_SAID = (
    "--use-tis is set but nothing says how to correct: pass a preset, for example "
    "--custom-config-path $(python -m mis_plugins config path tis); `config list --family start` has the others"
)
FILES = ("custom_config_path", "config")  # arguments that name a file of keys; the second is Miles's on FSDP


def _is_the_hosts(args: View, name: str) -> bool:
    """Whether the host made an argument that looks like ours: no file or mapping of the user's says it.

    Raises:
        ConfigError: this node cannot read the file that may say it.
    """
    if _resembles_a_switch(name) and not args[name]:
        return True
    if name in of_hooks(args):
        return False
    files = files_of(args)
    if files:
        return all(name not in keys_of_file(args, argument) for argument in files)
    return FILES[0] in args or not is_untyped(args)


def files_of(args: View) -> dict[str, str]:
    """The files of keys that a host was given, by the argument that names each."""
    read = FILES if args.get("train_backend") == "fsdp" else FILES[:1]
    given = {name: args.get(name) for name in read}
    return {
        name: os.fsdecode(path)
        for name, path in given.items()
        if path and isinstance(path, str | bytes | os.PathLike)
    }


def keys_of_file(args: View, argument: str) -> Mapping[str, Any]:
    """The keys of the file that an argument names: of the version that says most of what the arguments have.

    A file may be edited for the next job while a job runs, so that of equal versions the oldest counts.

    Raises:
        ConfigError: this node cannot read the file.
    """
    versions = keys_given(files_of(args)[argument])
    handed_on = [keys for keys in reversed(versions) if is_handed_on(args, keys)]
    ours = lambda keys: sum(is_read(key, value) and key != "use_tis" for key, value in keys.items())  # noqa: E731
    return max(handed_on, key=ours, default=versions[0])  # of equals the first


def _keys_of_readable_files(args: View) -> Iterator[Mapping[str, Any]]:
    """The keys of each file that this node can read; whoever needs another file says so."""
    for argument in files_of(args):
        with suppress(ConfigError):
            yield keys_of_file(args, argument)


def is_handed_on(args: View, keys: Mapping[str, Any]) -> bool:
    """Whether the arguments have what a file says in keys that are read here."""
    read = ((key, value) for key, value in keys.items() if is_read(key, value) and key not in HOST_KEYS)
    return all(equal(args.get(key), value) for key, value in read)


def looked_at(args: View) -> str:
    """Where a config was looked for, and not found."""
    return "; ".join(_looked_at(args))


def _looked_at(args: View) -> Iterator[str]:
    yield f"{kind(args)}: mis, {FLAT_KEYS[0]} ... {FLAT_KEYS[-1]}, {', '.join(AREAL_KEYS)}"
    for name in hooks_of(args):
        yield f"the config beside {name}"
    files = files_of(args)
    for name, file in files.items():
        yield f"--{name.replace('_', '-')} {short(file)}, {_found_in(args, name)}"
    if not files:
        yield "no --custom-config-path is given"


def _found_in(args: View, argument: str) -> str:
    try:
        keys = keys_given(files_of(args)[argument])[0]
    except ConfigError as error:
        return str(error)
    said, lost = [key for key, value in keys.items() if is_read(key, value)], _lost(args, keys)
    if lost:
        return f"which says {', '.join(lost)}, and the host has not made arguments of it"
    return f"which says {', '.join(said) or 'none of them'}"


# Configs by the repr of the keys that they were read from: a host asks for each micro-batch.
_READ_BEFORE: dict[str, CorrectionConfig] = {}


def _of_said(said: Mapping[str, Any]) -> CorrectionConfig:
    check_names(said)
    if said.get("rejection_sampling") is not None:
        raise ConfigError(
            "rejection_sampling: AReaL's block is not read; say it under `mis:`, as the preset "
            "areal-rejection-sampling does and `python -m mis_plugins config from-areal` writes (docs/peers.md tells "
            "where the answers differ)"
        )
    nested, use_tis = said.get("mis"), said.get("use_tis")
    flat = {key: said[key] for key in FLAT_KEYS if said.get(key) is not None}
    areal = {key: said[key] for key in AREAL_KEYS if said.get(key) is not None}
    _check_one_spelling(nested, flat, areal)
    config = from_mapping(nested)
    if areal:
        config = from_areal(areal, config.metrics)
    elif flat:
        metrics = (nested or {}).get("metrics", "full")  # Miles's mis.py hands back all
        corrects = flat.get("tis_upper_bound") is not None or use_tis
        config = from_flat(flat, metrics) if corrects else CorrectionConfig(metrics=metrics)
    return config


def correcting_keys(args: Any, config: CorrectionConfig) -> list[str]:
    """The user's names of what would change a loss: parts of `config`, and flat switches that are unread."""
    args = view(args)
    names = spelling(args)
    nested = "mis.segment_wise" if config.weighs_by_segment_wise else "mis.weight"
    weighs = [names.get("weight", nested)] if config.weight else []
    rules = [key for key in ("use_rs", "use_mask", "rs_veto_threshold") if getattr(args, key, None)]
    rules = rules or ["mis.reject"] * bool(config.reject)
    others = [
        names.get(part, f"mis.{part}") for part in ("opsm", "objective") if getattr(config, part) is not None
    ]
    return weighs + rules + others


def says_denominator(args: Any) -> bool:
    """Whether the config decides the denominator: flat keys without `use_mask` leave it to the host."""
    return bool(getattr(args, "use_mask", None)) or all(getattr(args, key, None) is None for key in FLAT_KEYS)


def idle_rule(keys: Mapping[str, Any]) -> str | None:
    """A warning about keys of a flat rule that nothing switches on; None where they act, or are not given."""
    idle = [key for key in RULE_KEYS if keys.get(key) is not None]
    if not idle or keys.get("use_rs") or keys.get("use_mask"):
        return None
    return f"{', '.join(idle)}: without effect, use_rs is off; say use_rs: true, or drop what has no effect"


def spelling(args: Any) -> dict[str, str]:
    """The user's flat keys by the fields that they set, for `MisError.spelled`; empty without flat keys."""
    said = areal_keys(view(args))
    areal = [key for key in AREAL_KEYS if key in said]
    if areal:
        bounds = [key for key in areal if key.startswith("behav_imp_")]
        return AREAL_NAMES | {"weight": (bounds or areal)[0]}
    if any(getattr(args, key, None) is not None for key in FLAT_KEYS):
        return FLAT_NAMES
    return {}


# Fields without a flat key are said under `mis:`, which excludes the flat keys.
AREAL_NAMES = {
    "segment_wise": "enable_segment_wise_ppo",
    "segment_wise.enabled": "enable_segment_wise_ppo",
    "segment_wise.method": "mis.segment_wise.method (in place of AReaL's keys)",
    "objective": "use_decoupled_loss",
    "objective.old": "mis.objective.old",
}
FLAT_NAMES = {
    "segment_wise.enabled": "mis.segment_wise.enabled (in place of Miles's flat keys)",
    "segment_wise.method": "mis.segment_wise.method (in place of Miles's flat keys)",
    "weight": "tis_upper_bound",
}


def _check_one_spelling(nested: Any, *flat: Mapping[str, Any]) -> None:
    said = ["`mis:`"] if isinstance(nested, Mapping) and set(nested) - {"metrics"} else []
    said += [f"the flat key {next(iter(keys))}" for keys in flat if keys]
    if len(said) > 1:
        raise ConfigError(f"both {said[0]} and {said[1]} are set; keep one of the spellings")


def preset_path(name: str) -> Path:
    """The file of a preset, in a checkout or in an installed package.

    Raises:
        ConfigError: names the nearest preset that exists.
    """
    known = presets()
    if name not in known:
        raise ConfigError(f"preset {shown(name)}: unknown{_suggest(name, known)}")
    return known[name]


def presets() -> dict[str, Path]:
    """The file of every preset by its name: ours at the top of the folder, those of other packages in `peers/`."""
    return {path.stem: path for path in sorted(_preset_folder().rglob("*.yaml"), key=lambda path: path.stem)}


def _preset_folder() -> Path:
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "presets", package.parent / "yaml") if folder.is_dir())


@contextmanager
def _spelled(**names: str) -> Iterator[None]:
    """Make a ConfigError that is raised in the block quote the user's names for its fields."""
    try:
        yield
    except ConfigError as error:
        raise error.spelled(names) from None


WEIGHING = (
    "mis",
    "mis.weight",
    "mis.segment_wise",
)  # where somebody may ask for weights by the target policy
BY_TARGET = (
    "target is refused: the surrogate holds pi_theta / pi_old already, and a weight of pi_theta / mu would make it "
    "pi_theta^2 / (pi_old mu). Drop the key: the weight is pi_old / mu, and both multiply to pi_theta / mu"
)


def _parse(cls: type, value: Any, path: str) -> Any:
    """Build the dataclass `cls` from a mapping; `path` is how the user would name it."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: got {shown(value)}; expected a mapping of {', '.join(_fields(cls))}")
    hints = _hints(cls)
    for key in value:
        if key not in hints:
            by_target = key == "reference" and value[key] == "target" and path in WEIGHING
            why = BY_TARGET if by_target else f"unknown key{_suggest(str(key), hints)}"
            raise ConfigError(f"{path}.{key}: {why}")
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in value:
            raise ConfigError(f"{path}.{field.name}: missing; give a value, as the key has no default")
    arguments = {key: _convert(hints[key], item, f"{path}.{key}") for key, item in value.items()}
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise error.spelled({}, f"{path}.") from None


def _convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotation `kind`, or an error that quotes `path`."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # typing.Union is the origin of `Literal[...] | None`
        if value is None and type(None) in choices:
            return None
        return _convert(choices[0], value, path)
    if (named := choices_of(kind)) is not None:
        if value not in named:
            raise ConfigError(f"{path}: got {shown(value)}; choose one of {', '.join(named)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: got {shown(value)}; expected a list")
        if len(value) > MOST_ITEMS:
            raise ConfigError(f"{path}: got {len(value)} items; expected at most {MOST_ITEMS}")
        return tuple(_convert(choices[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _parse(typing.cast(type, kind), value, path)
    if kind is int:
        return _whole(value, path)
    return _boolean(value, path) if kind is bool else number(value, path)


def choices_of(kind: Any) -> tuple[str, ...] | None:
    """What a key of this annotation may say: a Literal, or names of a table; None where it is not a closed choice."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return kind.__metadata__[0]() if typing.get_origin(kind) is Annotated else None


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: got {shown(value)}; expected true or false")
    return value


def _whole(value: Any, path: str) -> int:
    found = number(value, path)
    if not found.is_integer():
        raise ConfigError(f"{path}: got {shown(value)}; expected a whole number")
    return int(found)


def number(value: Any, path: str) -> float:
    """Convert a number, or a text such as 1e-4 (text to YAML), to a float.

    Text with an underscore is refused: Python would read verl's pair 0.5_5 as 0.55.

    Raises:
        ConfigError: it quotes `path`.
    """
    try:
        if isinstance(value, bool) or "_" in str(value):
            raise TypeError
        found = float(value)
        if math.isfinite(found) and abs(found) > LARGEST_FLOAT:
            raise OverflowError
        return found
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: got {shown(value)}; expected a number") from None
    except OverflowError:
        raise ConfigError(
            f"{path}: got {shown(value)}; expected a number that a float of 32 bits can hold"
        ) from None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _suggest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
