"""Reading a config: a dict, a file's keys or a host's arguments, in either of two spellings.

The nested key `mis:` is strict: an unknown key, a wrong type, a bound that cannot hold or a setting without
effect is a `ConfigError` that quotes the user's key. Flat keys mean what they mean in Miles's `mis.yaml`
(`tis_level`, `rs_veto_threshold`, ...), and are refused only where they cannot work.
"""

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from mis_plugins.config.file import OURS as BESIDE
from mis_plugins.config.file import SWITCHES, keys_given, short
from mis_plugins.config.model import WEIGHT_BOUNDS, CorrectionConfig
from mis_plugins.config.view import BACKENDS, FILES, View, contradicted, is_untyped, of_hooks, once, plain, view
from mis_plugins.errors import ConfigError, shown, warn_once

FLAT_KEYS = tuple(
    """tis_level tis_mode tis_lower_bound tis_upper_bound tis_batch_normalize use_rs use_mask
    rs_level rs_lower_bound rs_upper_bound rs_veto_threshold""".split()
)
# `max_head_offpolicyness` bounds the rollout, and is the host's own
AREAL_KEYS = ("enable_segment_wise_ppo", "behav_imp_weight_cap", "behav_imp_weight_floor", "use_decoupled_loss")
AREAL_BLOCKS = ("actor", "rollout")  # of AReaL's yaml, which hold its keys
HOST_KEYS = ("tis_clip", "tis_clip_low")  # the hosts' own flags of their built-in TIS
AREAL_PREFIXES = ("behav_imp_", "behave_imp_")
OUR_PREFIXES = ("tis_", "rs_", "mis_", *AREAL_PREFIXES)
REJECTION = "rejection_sampling"
READ_KEYS = frozenset((*FLAT_KEYS, *AREAL_KEYS, *HOST_KEYS, "mis", "use_tis", REJECTION))
OWN_KEYS = READ_KEYS - {REJECTION}  # a host's own key may have the name of AReaL's block
RULE_KEYS = ("rs_level", "rs_lower_bound", "rs_upper_bound")  # of the rule that `use_rs` or `use_mask` switches on
MOST_ITEMS = 64  # of a list; each rule costs every step its time
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, 3.4028234663852886e38  # that float32 holds in full precision


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
        raise ConfigError("mis.weight: missing beside mis.reject; say `weight: null` to reject without weighting")
    if isinstance(weight, Mapping) and weight.get("upper", 0) is None:
        raise ConfigError("mis.weight.upper: got None; leave it out for 2, or say `bound: none` for no bound")
    if segment_wise is None or "weight" not in mapping:
        return
    if weight is None:
        raise ConfigError("mis.weight: null contradicts mis.segment_wise, which is a weight; drop one of them")
    if isinstance(segment_wise, Mapping):
        for name in WEIGHT_BOUNDS:
            if name in segment_wise:
                raise ConfigError(
                    f"mis.segment_wise.{name}: has no effect beside mis.weight, which has bounds; drop it"
                )


def is_areals(key: str) -> bool:
    """Whether a key is one of AReaL's for its correction, or looks like one."""
    return key in (*AREAL_KEYS, REJECTION) or key.startswith(AREAL_PREFIXES)


def check_areal(keys: Mapping[str, Any]) -> None:
    """Refuse AReaL's keys, at the top level or in its blocks, which the translator alone reads."""
    blocks = {f"{name}.": keys[name] for name in AREAL_BLOCKS if isinstance(keys.get(name), Mapping)}
    given = ((at, key, value) for at, block in {"": keys, **blocks}.items() for key, value in block.items())
    if of_areal := [f"{at}{key}" for at, key, value in given if value is not None and is_areals(str(key))]:
        raise ConfigError(
            f"{', '.join(of_areal)}: of AReaL; give the host the file that `python -m mis_plugins config from-areal` "
            "writes (docs/peers.md tells where the answers differ)"
        )


@functools.cache  # a host has a thousand arguments, and asks for each micro-batch
def is_ours(name: str) -> bool:
    """Whether an argument of a host, or a top-level key of a config file, is read here, or refused."""
    plain = name.replace("-", "_")  # as on a command line
    if plain in READ_KEYS:
        return True
    if not plain.startswith(OUR_PREFIXES):
        return False
    from mis_plugins.config.messages import recorded_names

    return plain not in recorded_names()


def is_read(name: str, value: Any) -> bool:
    """Whether a top-level key with this value is read here, or refused: ours, or a block of AReaL's with its keys."""
    block = name in AREAL_BLOCKS and isinstance(value, Mapping)
    return is_ours(name) or (block and any(is_areals(str(key)) for key in value))


def check_names(names: Iterable[str]) -> None:
    """Refuse a key that looks like ours and is not."""
    given = tuple(names)
    if not READ_KEYS.issuperset(given):
        from mis_plugins.config.messages import check

        check(given)


def from_args(args: Any) -> CorrectionConfig:
    """The config that a host's arguments carry, in one of its spellings.

    Raises:
        ConfigError: a key of the user's that looks like ours and is not; two spellings at once; `--use-tis` with no
            config.
    """
    return once(view(args), _from_view)


def _from_view(stated: View) -> CorrectionConfig:
    ours = {name: value for name, value in stated.items() if is_ours(name)}
    for name in ours.keys() - OWN_KEYS:
        if _is_the_hosts(stated, name):
            del ours[name]
    if not is_untyped(stated):  # an attribute of the class, or a property, is an argument too
        others = {name: getattr(stated, name, None) for name in OWN_KEYS - ours.keys()}
        ours |= {name: value for name, value in others.items() if value is not None}
    for name in SWITCHES:
        convert(bool | None, getattr(stated, name, None), name)
    if beside := of_hooks(stated).keys() & BESIDE:
        raise ConfigError(f"{min(beside)}: stands beside `mis:` in a hook's config; write it under `mis:`")
    for name in filter(is_ours, contradicted(stated)):
        raise ConfigError(f"{name}: two hooks' configs give it two values; say it in one of them")
    for keys in _keys_of_readable_files(stated):
        check_areal(keys)
        check_names(keys)
    check_areal(ours | {name: stated[name] for name in AREAL_BLOCKS if name in stated})
    config = _of_keys({name: plain(value) for name, value in ours.items()})
    corrects = config.corrects or config.needs_loss_hook
    if not corrects and getattr(stated, "use_tis", False):
        from mis_plugins.config import messages

        raise ConfigError(f"{messages.NOTHING} (looked for in: {messages.looked_at(stated)})")
    if FILES[0] in files_of(stated):
        _check_handed_on(stated, corrects)
    return config


def _check_handed_on(args: View, corrects: bool) -> None:
    """Refuse arguments that lack keys of the user's file: the run would be corrected in part, or not at all."""
    name = f"--custom-config-path {short(str(args[FILES[0]]))}"
    try:
        keys = keys_of_file(args, FILES[0])
    except ConfigError as error:
        if corrects and isinstance(error.__cause__, OSError):
            return  # a file that is gone since the job read it
        raise
    if lost := lost_of(args, keys):
        raise ConfigError(f"{name} says {', '.join(lost)}, and the host has not made arguments of it")
    hosts = [key for key in HOST_KEYS if key in keys and not equal(args.get(key), keys[key])]
    differs = differing(args, keys)
    if (hosts or differs) and not corrects:
        raise ConfigError(
            f"{name} says another {', '.join(differs + hosts)} than the arguments, with which nothing corrects"
        )
    if differs:
        warn_once(
            f"{name} says another {', '.join(differs)} than the job's arguments, which hold: the file has changed "
            "since the job read it, or the host has put another value in its place"
        )


def lost_of(args: View, keys: Mapping[str, Any]) -> list[str]:
    """The keys of a file that are read here, and that the arguments lack."""
    read = [key for key, value in keys.items() if value is not None and is_read(key, value)]
    lost = [key for key in read if key != "use_tis" and args.get(key) is None]
    return lost + ["use_tis: true"] * bool(keys.get("use_tis") and not getattr(args, "use_tis", False))


def equal(first: Any, second: Any) -> bool:
    """Whether two values of a config say one thing: YAML leaves `2e1` a text, and a typed host makes a number of it."""
    first, second = plain(first), plain(second)
    if isinstance(first, str) != isinstance(second, str):
        with suppress(TypeError, ValueError):
            return float(first) == float(second)
    return bool(first == second)


def _is_the_hosts(args: View, name: str) -> bool:
    """Whether the host made an argument that looks like ours: no file or mapping of the user's says it.

    Raises:
        ConfigError: this node cannot read the file that may say it.
    """
    if name in of_hooks(args):
        return False
    files = files_of(args)
    if files:
        return all(name not in keys_of_file(args, argument) for argument in files)
    return FILES[0] in args or not is_untyped(args)


def files_of(args: View) -> dict[str, str]:
    """The files of keys that a host was given, by the argument that names each."""
    read = FILES if args.get("train_backend") in BACKENDS else FILES[:1]
    given = {name: args.get(name) for name in read}
    return {
        name: os.fsdecode(path) for name, path in given.items() if path and isinstance(path, str | bytes | os.PathLike)
    }


def keys_of_file(args: View, argument: str) -> Mapping[str, Any]:
    """The keys of the file that an argument names: of versions that no argument contradicts, the fullest.

    A file may be edited for the next job while a job runs, so that of equal versions the oldest counts. It raises
    ConfigError where this node cannot read the file.
    """
    versions = keys_given(files_of(args)[argument])
    handed_on = [keys for keys in reversed(versions) if not differing(args, keys)]
    ours = lambda keys: sum(is_read(key, value) and key != "use_tis" for key, value in keys.items())  # noqa: E731
    return max(handed_on, key=ours, default=versions[0])  # of equals the first


def _keys_of_readable_files(args: View) -> Iterator[Mapping[str, Any]]:
    """The keys of each file that this node can read; whoever needs another file says so."""
    for argument in files_of(args):
        with suppress(ConfigError):
            yield keys_of_file(args, argument)


def differing(args: View, keys: Mapping[str, Any]) -> list[str]:
    """The keys of a file that are read here, are no flags of the host's, and have another value in the arguments."""
    read = ((key, value) for key, value in keys.items() if is_read(key, value) and key not in HOST_KEYS)
    return [key for key, value in read if not equal(args.get(key), value)]


def _of_keys(given: Mapping[str, Any]) -> CorrectionConfig:
    check_names(given)
    nested = given.get("mis")
    flat = {key: given[key] for key in FLAT_KEYS if given.get(key) is not None}
    if flat and isinstance(nested, Mapping) and set(nested) - {"metrics"}:
        raise ConfigError(f"both `mis:` and the flat key {next(iter(flat))} are set; keep one of the spellings")
    config = from_mapping(nested)
    if not flat:
        return config
    metrics = (nested or {}).get("metrics", "full")  # Miles's mis.py hands back all
    corrects = flat.get("tis_upper_bound") is not None or given.get("use_tis")
    from mis_plugins.config.flat import from_flat

    return from_flat(flat, metrics) if corrects else CorrectionConfig(metrics=metrics)


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
    if any(getattr(args, key, None) is not None for key in FLAT_KEYS):
        from mis_plugins.config.flat import FLAT_NAMES

        return FLAT_NAMES
    return {}


def _parse(cls: type, value: Any, path: str) -> Any:
    """Build the dataclass `cls` from a mapping; `path` is how the user would name it."""
    if not isinstance(value, Mapping):
        names = ", ".join(field.name for field in dataclasses.fields(cls))
        raise ConfigError(f"{path}: got {shown(value)}; expected a mapping of {names}")
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in value:
        if key not in hints:
            from mis_plugins.config.messages import unknown

            raise ConfigError(unknown(path, str(key), value[key], hints))
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in value:
            raise ConfigError(f"{path}.{field.name}: missing; give a value, as the key has no default")
    arguments = {key: convert(hints[key], item, f"{path}.{key}") for key, item in value.items()}
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise error.spelled({}, f"{path}.") from None


def convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotation `kind`, or an error that quotes `path`."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # typing.Union is the origin of `Literal[...] | None`
        if value is None and type(None) in choices:
            return None
        return convert(choices[0], value, path)
    if (named := choices_of(kind)) is not None:
        if value not in named:
            raise ConfigError(f"{path}: got {shown(value)}; choose one of {', '.join(named)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: got {shown(value)}; expected a list")
        if len(value) > MOST_ITEMS:
            raise ConfigError(f"{path}: got {len(value)} items; expected at most {MOST_ITEMS}")
        return tuple(convert(choices[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _parse(typing.cast(type, kind), value, path)
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"{path}: got {shown(value)}; expected true or false")
    if kind is str and not isinstance(value, str):
        raise ConfigError(f"{path}: got {shown(value)}; expected text")
    if kind is int:
        return _whole(value, path)
    return value if kind in (bool, str) else number(value, path)


def choices_of(kind: Any) -> tuple[str, ...] | None:
    """What a key of this annotation may say: a Literal, or names of a table; None where it is not a closed choice."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return kind.__metadata__[0]() if typing.get_origin(kind) is Annotated else None


def _whole(value: Any, path: str) -> int:
    converted = number(value, path)
    if not converted.is_integer():
        raise ConfigError(f"{path}: got {shown(value)}; expected a whole number")
    return int(converted)


def number(value: Any, path: str) -> float:
    """Convert a number, or a text such as 1e-4 (text to YAML), to a float.

    Text with an underscore is refused: Python would read verl's pair 0.5_5 as 0.55. A ConfigError quotes `path`.
    """
    try:
        if isinstance(value, bool) or "_" in str(value):
            raise TypeError
        converted = float(value)
        if math.isfinite(converted) and converted and not SMALLEST_FLOAT <= abs(converted) <= LARGEST_FLOAT:
            raise OverflowError
        return converted
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: got {shown(value)}; expected a number") from None
    except OverflowError:
        raise ConfigError(
            f"{path}: got {shown(value)}; expected a number that a float of 32 bits holds in full"
        ) from None


def suggest(name: str, names: Iterable[str], otherwise: str | None = None) -> str:
    """The end of an error about an unknown name: the nearest that is known, else `otherwise` or all known names."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name.lower(), names, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(names)}" if otherwise is None else otherwise
