"""Both spellings of the config: what they mean, that they meet, and that what is written is read back."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import yaml
from batches import MILES_YAML, flat_configs, nested
from hypothesis import given
from hypothesis import strategies as st
from tolerances import EPS64

from mis_plugins.config import writing
from mis_plugins.config.flat import from_flat
from mis_plugins.config.loading import load, preset_path
from mis_plugins.config.messages import correcting_keys
from mis_plugins.config.model import CorrectionConfig, NormalizeConfig, RejectRule, SegmentWiseConfig, WeightConfig
from mis_plugins.config.reading import from_args, from_mapping, spelling
from mis_plugins.config.terms.statistics import LARGEST_BINARY_KL, LEAST_PROBABILITY
from mis_plugins.errors import ConfigError


def test_nested_defaults():
    assert from_mapping({"weight": {}}) == CorrectionConfig(weight=WeightConfig())
    weight = from_mapping({"weight": {"normalize": {}}}).weight
    assert weight == WeightConfig("token", "truncate", None, 2.0, NormalizeConfig("micro_batch", "valid"))
    assert from_mapping({}) == CorrectionConfig() == from_mapping(None)
    assert CorrectionConfig().metrics == "watch"


def test_everything_nested():
    mapping = {
        "weight": {"level": "sequence", "bound": "clip", "lower": 0.25, "upper": 4,
                   "normalize": {"scope": "rollout", "over": "kept"}},
        "reject": [{"statistic": "ratio", "over": "mean", "lower": 0.99, "upper": 1.01},
                   {"over": "min", "lower": 1e-4}],
        "metrics": "core",
    }  # fmt: skip
    weight = WeightConfig("sequence", "clip", 0.25, 4.0, NormalizeConfig("rollout", "kept"))
    rules = (RejectRule("ratio", "mean", 0.99, 1.01), RejectRule("ratio", "min", 1e-4))
    assert from_mapping(mapping) == CorrectionConfig(weight, rules, "core")


def test_miles_yaml():
    """The file that Miles ships, in both spellings, and our preset of it."""
    expected = CorrectionConfig(
        WeightConfig(upper=2.0, normalize=NormalizeConfig()),
        (RejectRule(over="token", lower=0.5, upper=2.0), RejectRule(over="min", lower=1e-4)),
        "full",
    )
    assert from_flat(MILES_YAML) == expected
    assert from_args(SimpleNamespace(use_tis=True, **MILES_YAML)) == expected
    assert load(preset_path("mis")) == expected


@given(flat_configs())
def test_flat_keys_mean_the_nested_ones(flat: dict):
    assert from_flat(flat) == from_mapping(nested(flat) | {"metrics": "full"})


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0E-4"])
def test_numbers_that_yaml_reads_as_text(text: str):
    flat = from_flat(MILES_YAML | {"rs_veto_threshold": text})
    assert flat.reject[-1].lower == 1e-4
    assert from_mapping({"weight": None, "reject": [{"over": "min", "lower": text}]}).reject[0].lower == 1e-4


def test_metrics_beside_flat_keys():
    args = SimpleNamespace(use_tis=True, mis={"metrics": "core"}, **MILES_YAML)
    assert from_args(args) == dataclasses.replace(from_flat(MILES_YAML), metrics="core")


def test_the_hosts_own_clip_flags_are_not_ours():
    args = SimpleNamespace(use_tis=True, tis_clip=2.0, tis_clip_low=0.0, mis={"weight": {"upper": 3.0}})
    assert from_args(args).weight == WeightConfig(upper=3.0)


@pytest.mark.parametrize(("good", "alike"), [
    ({"tis_upper_bound": 2.0, "use_rs": True}, {"tis_upper_bound": 2.0, "use_rs": 1}),
    ({"mis": {"weight": {"upper": 2.0}, "keep_floor": 1.0}}, {"mis": {"weight": {"upper": 2.0}, "keep_floor": True}}),
])  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_beside_an_equal_one(good: dict, alike: dict):
    """1 == 1.0 == True: a config that was read before is not that of keys which compare equal."""
    from_args(SimpleNamespace(**good))
    with pytest.raises(ConfigError, match="got (1|True); expected"):
        from_args(SimpleNamespace(**alike))


@pytest.mark.parametrize(
    ("config", "of_a_segment", "of_a_sequence"),
    [
        ({"weight": {"bound": "mask"}}, True, True),
        ({"weight": {"level": "segment", "bound": "mask"}}, False, True),
        ({"weight": {"level": "sequence", "bound": "mask"}}, False, False),
        ({"weight": {"bound": "clip"}}, False, False),
        ({"weight": {"level": "segment_geometric", "bound": "zero"}}, False, False),
        ({"weight": None, "reject": [{"upper": 2}]}, True, True),
        ({"weight": None, "reject": [{"upper": 2, "down_weigh": 0.5}]}, False, False),
        ({"weight": None, "reject": [{"over": "mean", "unit": "segment", "upper": 2}]}, False, True),
        ({"weight": None, "reject": [{"over": "mean", "upper": 2}]}, False, False),
    ],
)
def test_what_can_be_dropped_within_a_unit(config: dict, of_a_segment: bool, of_a_sequence: bool):
    """Tokens of either, segments of a sequence alone; only rules and mask bounds drop."""
    parsed = from_mapping(config)
    assert (parsed.drops_below("segment"), parsed.drops_below("sequence")) == (of_a_segment, of_a_sequence)


@pytest.mark.parametrize(
    ("statistic", "low", "high"),
    [("prob_diff", -1, 1), ("abs_prob_diff", 0, 1), ("proximal_prob", 0, 1), ("behavior_prob", 0, 1)],
)
def test_bounds_lie_within_what_probabilities_can_be(statistic: Any, low: float, high: float):
    RejectRule(statistic, lower=low + EPS64, upper=high - EPS64)
    for lower, upper in ((low, None), (None, high)):
        with pytest.raises(ConfigError, match=f"lies between {low} and {high}"):
            RejectRule(statistic, lower=lower, upper=upper)


@pytest.mark.parametrize(
    ("weight", "takes"),
    [({"level": "sequence"}, True), ({"level": "segment_geometric"}, True), ({"level": "token"}, False), (None, False)],
)
def test_kept_tokens_are_those_of_a_weight_too(weight: dict | None, takes: bool):
    """Beside a rule over tokens alone, there is only the weight to add them up."""
    config = {"weight": weight, "reject": [{"upper": 2}], "aggregate": "kept"}
    if takes:
        assert from_mapping(config).weight_population == "kept"
    else:
        with pytest.raises(ConfigError, match="mis.aggregate: kept has no effect"):
            from_mapping(config)


def test_kept_denominator_needs_something_that_drops():
    for dropping in (
        {"weight": {"bound": "mask"}},
        {"weight": None, "reject": [{"upper": 2}]},
        {"opsm": {"delta": 0.1}},
    ):
        assert from_mapping(dropping | {"denominator": "kept"}).denominator == "kept"
    with pytest.raises(ConfigError, match="mis.denominator: kept has no effect where nothing is rejected"):
        from_mapping({"weight": {"bound": "zero"}, "denominator": "kept"})


def test_flat_keys_are_what_an_error_of_a_hook_quotes():
    flat = spelling(SimpleNamespace(tis_upper_bound=2.0))
    assert flat["weight"] == "tis_upper_bound" and "Miles's flat keys" in flat["segment_wise.enabled"]
    assert spelling(SimpleNamespace(tis_upper_bound=None)) == {}


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        (MILES_YAML, ["tis_upper_bound", "use_rs", "rs_veto_threshold"]),
        ({"mis": {"weight": {}, "reject": [{"upper": 2}]}}, ["mis.weight", "mis.reject"]),
        ({"mis": {"weight": None, "reject": [{"upper": 2}]}}, ["mis.reject"]),
        ({"mis": {"segment_wise": {}}}, ["mis.segment_wise"]),
        ({"mis": {"m2_threshold": 0.04, "group_baseline": None}}, ["mis.m2_threshold"]),
        ({"mis": {"m2_threshold": 0.04, "opsm": {"delta": 0.1}}}, ["mis.m2_threshold", "mis.opsm"]),
        ({"mis": {"weight": {}, "group_baseline": "rloo"}}, ["mis.weight", "mis.group_baseline"]),
        (
            {"mis": {"center": {"top_k": 8}, "objective": {"surrogate": "reinforce", "old": "behavior"}}},
            ["mis.objective", "mis.center"],
        ),
        ({}, []),
    ],
)
def test_what_weighs_and_rejects_goes_by_the_users_own_key(said: dict, keys: list[str]):
    args = SimpleNamespace(**said)
    assert correcting_keys(args, from_args(args)) == keys


def test_a_written_config_says_what_is_not_the_default():
    assert writing.as_mapping(CorrectionConfig()) == {"metrics": "watch"}
    segment_wise = {"enabled": True, "weight_cap": 5.0, "mode": "truncate"}
    assert writing.as_mapping(from_mapping({"segment_wise": {}})) == {"segment_wise": segment_wise, "metrics": "watch"}
    rejecting = CorrectionConfig(None, (RejectRule(upper=2.0),))
    assert writing.as_mapping(rejecting) == {
        "weight": None,
        "reject": [{"over": "token", "upper": 2.0}],
        "metrics": "watch",
    }


def test_binary_kl_is_bounded_by_the_most_it_can_be():
    """Of what one policy finds certain and the other impossible; 1 - 1e-6 is known to a spacing of float64."""
    most = [oracle.binary_kl(0.0, 1.0), oracle.binary_kl(1.0, 0.0)]
    assert pytest.approx(most, abs=2 * EPS64 / LEAST_PROBABILITY) == [LARGEST_BINARY_KL] * 2
    RejectRule("binary_kl", upper=math.nextafter(LARGEST_BINARY_KL, 0))
    with pytest.raises(ConfigError, match="between 0 and 13.8155"):
        RejectRule("binary_kl", upper=LARGEST_BINARY_KL)


def test_configs_are_values():
    """Frozen and hashable: one config is one key, and nobody edits it between calls."""
    config = from_mapping({"weight": {}, "reject": [{"lower": 0.5}]})
    assert hash(config) == hash(from_mapping({"weight": {}, "reject": [{"lower": 0.5}]}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.metrics = "none"  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ segment-wise weights


def test_the_block_is_a_weight_and_on():
    config = from_mapping({"segment_wise": {}})
    assert config.segment_wise == SegmentWiseConfig(enabled=True)
    assert config.weight == WeightConfig("token", "truncate", upper=5.0)
    assert config.segment_wise_on and config.needs_loss_hook and config.corrects
    beside_rules = from_mapping({"segment_wise": {}, "reject": [{"over": "mean", "upper": 2}]})
    assert beside_rules.weight is not None and len(beside_rules.reject) == 1


def test_off_is_the_standard_weight():
    config = from_mapping({"segment_wise": {"enabled": False, "weight_cap": "3", "mode": "clip"}})
    assert config.weight == WeightConfig("token", "clip", None, 3.0)
    assert not config.segment_wise_on and not config.needs_loss_hook


def test_a_weight_beside_it_bounds_and_normalizes():
    config = from_mapping({"weight": {"upper": 3, "normalize": {}}, "segment_wise": {"method": "loglinear"}})
    assert config.weight == WeightConfig("token", "truncate", upper=3.0, normalize=NormalizeConfig())
    assert config.segment_wise_on and not config.weighs_by_segment_wise


@pytest.mark.parametrize(
    ("mapping", "on"),
    [
        ({"weight": {}}, True),
        ({"weight": {}, "opsm": {"delta": 0.1}, "objective": {"ratio": "sequence"}}, True),
        ({"weight": {}, "segment_wise": {"enabled": False}}, False),
        ({"weight": {"level": "sequence"}}, False),
        ({"weight": None, "reject": [{"upper": 2}]}, False),
        ({"weight": {}, "objective": {"old": "behavior", "surrogate": "reinforce"}}, False),
        ({}, False),
    ],
)
def test_where_versions_are_known_it_is_on_unless_something_speaks_against_it(mapping: dict, on: bool):
    config = from_mapping(mapping)
    in_force = config.where_versions_are_known()
    assert in_force.segment_wise_on == on and not config.segment_wise_on
    assert in_force.weight == config.weight
    assert in_force.where_versions_are_known() == in_force


def test_bounds_beside_a_weight_are_refused_in_python_too():
    with pytest.raises(ConfigError, match=r"^segment_wise\.weight_cap: has no effect beside weight"):
        CorrectionConfig(WeightConfig(), segment_wise=SegmentWiseConfig(weight_cap=3.0))


blocks = st.fixed_dictionaries(
    {"enabled": st.just(True)},
    optional={
        "method": st.just("loglinear"),
        "fresh_tokens": st.sampled_from(["proximal", "behavior", "behavior_at_age_0"]),
        "clip_against": st.sampled_from(["next", "proximal"]),
    },
)
bounds = st.one_of(
    st.fixed_dictionaries({}, optional={"weight_cap": st.sampled_from([None, 2.0, 5.0, 1e-4])}),
    st.fixed_dictionaries(
        {"mode": st.sampled_from(["clip", "mask", "zero"]), "weight_cap": st.sampled_from([2.0, 5.0])},
        optional={"weight_floor": st.sampled_from([None, 0.0, 0.5])},
    ),
)


@given(blocks, bounds, st.booleans(), st.booleans(), st.booleans())
def test_what_is_written_is_read_back(block: dict, bound: dict, enabled: bool, weighted: bool, rules: bool):
    mapping = {"reject": [{"over": "mean", "upper": 2.0}]} if rules else {}
    if not enabled:
        block = {"enabled": False}
    if weighted:
        mapping |= {"weight": {"bound": "clip", "upper": 3, "normalize": {}}, "segment_wise": block}
    else:
        mapping |= {"segment_wise": block | bound}
    config = from_mapping(mapping)
    text = writing.to_yaml(writing.as_mapping(config))
    assert from_mapping(yaml.safe_load(text)["mis"]) == config
