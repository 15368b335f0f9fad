"""Reading a config: a dict, a file's keys or a host's Namespace, in either of two spellings.

The nested key `mis:` is strict: an unknown key, a wrong type, a bound that cannot hold or a setting without effect
is a `ConfigError` that quotes the user's key. Miles's flat keys (`tis_level`, `rs_veto_threshold`, ...) mean what
its `mis.yaml` says, and are refused only where they cannot work.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mis_plugins.config import (
    LEVEL_OVER,
    CorrectionConfig,
    Metrics,
    NormalizeConfig,
    RejectRule,
    WeightConfig,
    check_ratio_bounds,
)
from mis_plugins.errors import ConfigError

FLAT_KEYS = (
    "tis_level",
    "tis_mode",
    "tis_lower_bound",
    "tis_upper_bound",
    "tis_batch_normalize",
    "use_rs",
    "rs_level",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
)
HOST_KEYS = ("tis_clip", "tis_clip_low")  # the hosts' own flags of their built-in TIS
FlatLevel = Literal["token", "sequence", "geometric"]
FlatMode = Literal["truncate", "clip", "mask"]


def from_mapping(mapping: Any) -> CorrectionConfig:
    """The nested spelling: what stands under `mis:`.

    >>> from_mapping({"weight": {"upper": 3}, "reject": [{"over": "min", "lower": "1e-4"}]}).weight.upper
    3.0
    """
    if isinstance(mapping, Mapping) and "reject" in mapping and "weight" not in mapping:
        raise ConfigError(
            "mis.weight: missing beside mis.reject; say `weight: null` to reject without weighting"
        )
    weight = mapping.get("weight") if isinstance(mapping, Mapping) else None
    if isinstance(weight, Mapping) and weight.get("upper", 0) is None:
        raise ConfigError("mis.weight.upper: got None; leave it out for 2, or say `bound: none` for no bound")
    return _parse(CorrectionConfig, {} if mapping is None else mapping, "mis")


def from_flat(keys: Mapping[str, Any], metrics: Metrics = "full") -> CorrectionConfig:
    """Miles's flat keys, as its `mis.yaml` documents them. A veto needs no `use_rs` here."""
    flat = {key: keys.get(key) for key in FLAT_KEYS}
    number = lambda key: _convert(float | None, flat[key], key)  # noqa: E731
    lower, upper, veto = number("tis_lower_bound"), number("tis_upper_bound"), number("rs_veto_threshold")
    if upper is None:
        raise ConfigError("tis_upper_bound: unset; every tis_mode needs it (mis.yaml has 2.0)")
    bound = _convert(FlatMode, flat["tis_mode"] or "truncate", "tis_mode")
    with _spelled(lower="tis_lower_bound", upper="tis_upper_bound"):
        check_ratio_bounds(lower, upper)
    with _spelled(lower="tis_lower_bound", upper="tis_upper_bound", bound="tis_mode"):
        weight = WeightConfig(
            level=_convert(FlatLevel, flat["tis_level"] or "token", "tis_level"),
            bound=bound,
            lower=None if bound == "truncate" else lower,
            upper=upper,
            normalize=NormalizeConfig()
            if _convert(bool, flat["tis_batch_normalize"] or False, "tis_batch_normalize")
            else None,
        )
    rules = []
    if _convert(bool, flat["use_rs"] or False, "use_rs"):
        rules.append(_flat_rule(flat, lower, upper))
    if veto is not None:
        with _spelled(lower="rs_veto_threshold"):
            rules.append(RejectRule(over="min", lower=veto))
    return CorrectionConfig(weight, tuple(rules), metrics)


def _flat_rule(flat: Mapping[str, Any], tis_lower: float | None, tis_upper: float) -> RejectRule:
    """`use_rs`: bounds that are unset fall back to those of the weight, as in Miles."""
    lower = _convert(float | None, flat["rs_lower_bound"], "rs_lower_bound")
    upper = _convert(float | None, flat["rs_upper_bound"], "rs_upper_bound")
    fallback = 1 / tis_upper if tis_lower is None else tis_lower
    with _spelled(
        lower="rs_lower_bound" if lower is not None else "rs_lower_bound (unset, from the tis_ bounds)",
        upper="rs_upper_bound" if upper is not None else "rs_upper_bound (unset, from tis_upper_bound)",
    ):
        return RejectRule(
            over=LEVEL_OVER[_convert(FlatLevel, flat["rs_level"] or "token", "rs_level")],
            lower=fallback if lower is None else lower,
            upper=tis_upper if upper is None else upper,
        )


def from_args(args: Any) -> CorrectionConfig:
    """The config that a host's argument Namespace carries, in either spelling.

    Raises:
        ConfigError: a key that looks like ours and is not; both spellings at once; `--use-tis` with no config.
    """
    attributes = vars(args)
    for name in attributes:
        if name.startswith(("tis_", "rs_", "mis_")) and name not in FLAT_KEYS + HOST_KEYS:
            raise ConfigError(f"{name}: unknown key{_suggest(name, FLAT_KEYS)}")
    nested = attributes.get("mis")
    flat = {key: attributes[key] for key in FLAT_KEYS if key in attributes}
    if flat and isinstance(nested, Mapping) and set(nested) - {"metrics"}:
        raise ConfigError(
            f"both `mis:` and the flat key {next(iter(flat))} are set; keep one of the two spellings"
        )
    config = from_mapping(nested)
    if flat and flat.get("tis_upper_bound") is None and not attributes.get("use_tis"):
        return config
    if flat:
        config = from_flat(flat, config.metrics)
    if attributes.get("use_tis") and not (config.corrects or config.needs_loss_hook):
        raise ConfigError(
            "--use-tis is set but nothing says how to correct: pass a preset, for example "
            "--custom-config-path $(python -m mis_plugins config path mis)"
        )
    return config


def preset_path(name: str) -> Path:
    """The file of a preset, in a checkout or in an installed package.

    Raises:
        ConfigError: names the nearest preset that exists.
    """
    presets = {path.stem: path for path in sorted(_preset_folder().glob("*.yaml"))}
    if name not in presets:
        raise ConfigError(f"preset {name!r}: unknown{_suggest(name, presets)}")
    return presets[name]


def _preset_folder() -> Path:
    package = Path(__file__).parent
    return next(folder for folder in (package / "presets", package.parent / "yaml") if folder.is_dir())


@contextmanager
def _spelled(**names: str) -> Iterator[None]:
    """Within, a ConfigError quotes these names for its fields."""
    try:
        yield
    except ConfigError as error:
        raise error.spelled(names) from None


def _parse(cls: type, value: Any, path: str) -> Any:
    """Build the dataclass `cls` from a mapping; `path` is how the user would name it."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: got {value!r}; expected a mapping of {', '.join(_fields(cls))}")
    hints = _hints(cls)
    for key in value:
        if key not in hints:
            raise ConfigError(f"{path}.{key}: unknown key{_suggest(str(key), hints)}")
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.name not in value:
            raise ConfigError(f"{path}.{field.name}: missing; it has no default")
    arguments = {key: _convert(hints[key], item, f"{path}.{key}") for key, item in value.items()}
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise error.spelled({}, f"{path}.") from None


def _convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotation `kind`, or an error that quotes `path`."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None and type(None) in choices:
            return None
        return _convert(choices[0], value, path)
    if origin is Literal:
        if value not in choices:
            raise ConfigError(f"{path}: got {value!r}; choose one of {', '.join(choices)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path}: got {value!r}; expected a list")
        return tuple(_convert(choices[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _parse(typing.cast(type, kind), value, path)
    return _boolean(value, path) if kind is bool else _number(value, path)


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: got {value!r}; expected true or false")
    return value


def _number(value: Any, path: str) -> float:
    """YAML reads 1e-4 as text: a number all the same."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: got {value!r}; expected a number") from None


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fields(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _suggest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
