"""Room `config`: valid configs with a few edits, as YAML text: an error of ours in words, or weights of the oracle."""

from __future__ import annotations

import copy
import datetime
import math
from collections.abc import Iterator
from typing import Any

import oracle
import torch
import yaml
from batches import configs, flat_configs, nested, ratio_batch
from hypothesis import strategies as st

from mis_plugins import mis
from mis_plugins.config.file import parsed
from mis_plugins.config.loading import as_arguments, read_keys
from mis_plugins.config.reading import from_mapping
from mis_plugins.config.writing import as_mapping, to_yaml
from mis_plugins.errors import MisError
from mis_plugins.explain import formula, words

BATCH = ratio_batch(
    [[0.2, 3.0, 1.1, 0.97], [1.7], [0.6, 0.6, 1.02], [0.99, 1.3]], [[1, 1, 0, 1], [1], [1, 1, 1], [1, 1]]
)
LONGEST = 700  # letters of an error
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.dates(), st.binary(max_size=3),
    st.sampled_from([10**400, -1, 0, 1e308, 1e-320, 1e-46, 3e38, "1e-4", " 2 ", "1_0", "1:30", "0x10", "\u0662"]),
    st.sampled_from(["\u221e", "nan", "-inf", "off", "~", [], {}, set(), datetime.datetime(2026, 1, 1)]),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.sampled_from(["upper", "level", "x"]), st.floats(), max_size=2),
)  # fmt: skip
EXTRAS = {
    "m2_threshold": [1e-3, 0.1, 0.5, "0.1"], "keep_floor": [0, 0.5, 1],
    "metrics": ["none", "core", "full", "all", "watch"],
    "denominator": ["kept", "original"], "aggregate": ["kept", "valid"], "on_all_rejected": ["skip", "keep", "raise"],
    "resplit_every": [1, 2.0, "3"], "opsm": [{"delta": 1e-4}], "group_baseline": ["grpo", "rloo"], "routing": [{}],
    "segment_wise": [{}, {"enabled": False}, {"weight_cap": 2}], "center": [{}],
    "objective": [{}, {"old": "behavior", "surrogate": "reinforce"}, {"surrogate": "gmpo"}],
}  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each mapping or list within a value, with each key or index of it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


@st.composite
def cases(draw: st.DrawFn) -> str:
    """YAML text of a config file."""
    keys = copy.deepcopy(draw(flat_configs()) if draw(st.integers(0, 3)) == 0 else {"mis": draw(configs())})
    for name in draw(st.sets(st.sampled_from(sorted(EXTRAS)), max_size=2)) if "mis" in keys else ():
        keys["mis"][name] = copy.deepcopy(draw(st.sampled_from(EXTRAS[name])))
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        spots = list(places(keys))
        if not spots:
            break
        holder, key = draw(st.sampled_from(spots))
        edit = draw(st.sampled_from(["odd", "odd", "text", "drop", "add", "case", "twice"]))
        if edit == "drop":
            del holder[key]
        elif edit == "add" and isinstance(holder, dict):
            name = draw(st.text(max_size=4) | st.sampled_from(["upper", "lower", "over", "unit", "self", "<<"]))
            holder[name] = draw(ODD)
        elif edit == "case" and isinstance(holder, dict):
            spell = draw(st.sampled_from([str.upper, str.title, lambda x: x + " ", lambda x: x.replace("_", "-")]))
            holder[spell(str(key))] = holder.pop(key)
        elif edit == "twice" and isinstance(holder, list):
            holder.append(holder[key])  # an alias
        elif edit == "text":
            holder[key] = str(holder[key])
        else:
            holder[key] = draw(ODD)
    return yaml.safe_dump(keys, allow_unicode=True, sort_keys=draw(st.booleans()))


def judge(text: str) -> str:
    """`error`, `right`, or `acts` where the oracle does not know the config; an AssertionError otherwise."""
    try:
        keys = parsed(text)
        if not isinstance(keys, dict):
            return "our error"
        config = read_keys(keys)
        config_again = from_mapping(parsed(to_yaml(as_mapping(config)))["mis"])
        assert config_again == config, f"written and read again it is {config_again}"
        assert words.describe(config) and formula.formula(config)
        weights, masks, metrics = mis.compute_mis_weights(as_arguments({"use_tis": True, **keys}), **BATCH.lists())
    except MisError as error:
        said = str(error)
        assert len(said) < LONGEST, f"an error of {len(said)} letters: {said!r}"
        return "our error"
    assert all(torch.isfinite(x).all() for x in weights or ()), "a weight is not finite"
    expected = known(keys)
    if expected is None or weights is None or expected.margin < 1e-4:
        return "acts"
    for i, sample in enumerate(BATCH.samples):
        assert masks[i].bool().tolist() == expected.keep[i], f"mask {i}: {masks[i]}, not {expected.keep[i]}"
        for t in sample.valid:
            wanted = expected.weights[i][t] * expected.scale[i] if expected.keep[i][t] else 0.0
            found = float(weights[i][t]) if expected.keep[i][t] else 0.0
            assert math.isclose(found, wanted, rel_tol=1e-4, abs_tol=0), f"weight {i}:{t}: {found}, not {wanted}"
    return "right"


def known(keys: dict[str, Any]) -> oracle.Corrected | None:
    """The oracle's answer to what a file says; None where the oracle does not know one of its words."""
    try:
        said = numbers(keys.get("mis")) if keys.get("mis") is not None else nested_flat(keys)
        if "segment_wise" in said:
            return None
        weight = said.setdefault("weight", None)
        if weight is not None:
            weight.setdefault("level", "token")
            weight.setdefault("bound", "truncate")
        said["reject"] = [{"over": "token", "statistic": "ratio"} | rule for rule in said.get("reject", [])]
        return oracle.correct(BATCH.samples, said)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def nested_flat(keys: dict[str, Any]) -> dict[str, Any]:
    keys = numbers(keys)
    given = dict.fromkeys(["rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "tis_lower_bound"]) | keys
    for name, default in (("tis_level", "token"), ("tis_mode", "truncate"), ("rs_level", "token"),
                          ("use_rs", False), ("tis_batch_normalize", False)):  # fmt: skip
        given[name] = given.get(name) or default
    given["use_rs"] = given["use_rs"] or given.get("use_mask")
    for name in ("rs_lower_bound", "tis_lower_bound"):
        lower = given[name]
        given[name] = None if lower is None else max(lower, 0)
    return nested(given)


def numbers(value: Any) -> Any:
    """The value with texts that are numbers as numbers, and without keys that say nothing."""
    if isinstance(value, dict):
        return {key: numbers(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [numbers(inner) for inner in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
