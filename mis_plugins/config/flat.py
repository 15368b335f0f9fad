"""Miles's flat keys, as its `mis.yaml` documents them, and `use_mask` of its blog."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from mis_plugins.config import model
from mis_plugins.config.model import CorrectionConfig, RejectRule, check_ratio_bounds
from mis_plugins.config.reading import FLAT_KEYS, convert
from mis_plugins.config.terms.bounds import BOUNDS
from mis_plugins.errors import ConfigError

FlatLevel = Literal["token", "sequence", "geometric"]
FlatMode = Literal["truncate", "clip", "mask"]
# Fields without a flat key are said under `mis:`, which excludes the flat keys.
FLAT_NAMES = {
    "segment_wise.enabled": "mis.segment_wise.enabled (in place of Miles's flat keys)",
    "segment_wise.method": "mis.segment_wise.method (in place of Miles's flat keys)",
    "weight": "tis_upper_bound",
}


def from_flat(keys: Mapping[str, Any], metrics: model.Metrics = "full") -> CorrectionConfig:
    """Read Miles's flat keys, as its `mis.yaml` documents them, and `use_mask` of its blog.

    A veto needs no `use_rs` here. `use_rs` and `use_mask` both leave tokens outside the bounds without a
    gradient; `use_mask` counts them in the denominator on every host. As in Miles, a lower bound of 0 or
    below means none, and an unset one 1 / upper.
    """
    flat = {key: keys.get(key) for key in FLAT_KEYS}
    upper, veto = (_value(flat, key, float, None) for key in ("tis_upper_bound", "rs_veto_threshold"))
    lower = _lower_bound(flat, "tis_lower_bound")
    if upper is None:
        raise ConfigError("tis_upper_bound: unset; every tis_mode needs it (mis.yaml has 2.0)")
    bound = _value(flat, "tis_mode", FlatMode, "truncate")
    with spelled(lower="tis_lower_bound", upper="tis_upper_bound"):
        check_ratio_bounds(lower or None, upper, unbounded="0")
    with spelled(lower="tis_lower_bound", upper="tis_upper_bound", bound="tis_mode"):
        weight = model.WeightConfig(
            level=_value(flat, "tis_level", FlatLevel, "token"),
            bound=bound,
            lower=lower if BOUNDS[bound].has_floor else None,
            upper=upper,
            normalize=model.NormalizeConfig() if _value(flat, "tis_batch_normalize", bool, False) else None,
        )
    rules = []
    if _drops_outside(flat):
        rules.append(_flat_rule(flat, lower, upper))
    if veto is not None:
        with spelled(lower="rs_veto_threshold"):
            rules.append(RejectRule(over="min", lower=veto))
    return CorrectionConfig(weight, tuple(rules), metrics)


def _value(flat: Mapping[str, Any], key: str, kind: Any, unset: Any) -> Any:
    """What a key says; only null leaves it unset."""
    return unset if flat[key] is None else convert(kind, flat[key], key)


def _drops_outside(flat: Mapping[str, Any]) -> bool:
    """Whether `use_rs` or `use_mask` is on; they share their bounds, so that both at once contradict each other."""
    drops, masks = (_value(flat, key, bool, False) for key in ("use_rs", "use_mask"))
    if drops and masks:
        raise ConfigError(
            "use_rs and use_mask are both true: one leaves rejected tokens out of the average where the host can, the "
            "other counts them; keep one of them"
        )
    return drops or masks


def _flat_rule(flat: Mapping[str, Any], tis_lower: float | None, tis_upper: float) -> RejectRule:
    """`use_rs` or `use_mask`: bounds that are unset fall back to those of the weight, as in Miles."""
    lower = _lower_bound(flat, "rs_lower_bound")
    upper = _value(flat, "rs_upper_bound", float, None)
    fallback = 1 / tis_upper if tis_lower is None else tis_lower
    with spelled(
        lower="rs_lower_bound" if lower is not None else "rs_lower_bound (unset, from the tis_ bounds)",
        upper="rs_upper_bound" if upper is not None else "rs_upper_bound (unset, from tis_upper_bound)",
    ):
        bounds = (fallback if lower is None else lower) or None, tis_upper if upper is None else upper
        check_ratio_bounds(*bounds, unbounded="0")
        over = model.LEVEL_OVER[_value(flat, "rs_level", FlatLevel, "token")]
        return RejectRule(over=over, lower=bounds[0], upper=bounds[1])


def _lower_bound(flat: Mapping[str, Any], key: str) -> float | None:
    """A lower bound of a ratio, which is never below 0: whatever is below 0 bounds as little as 0 does."""
    bound = _value(flat, key, float, None)
    return None if bound is None else max(bound, 0.0)


@contextmanager
def spelled(**names: str) -> Iterator[None]:
    """Make a ConfigError that is raised in the block quote the user's names for its fields."""
    try:
        yield
    except ConfigError as error:
        raise error.spelled(names) from None
