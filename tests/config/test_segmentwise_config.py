"""`mis.segment_wise` as it is read, refused, combined with a weight, written, and said in AReaL's words."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mis_plugins.config import writing
from mis_plugins.config.model import CorrectionConfig, NormalizeConfig, SegmentWiseConfig, WeightConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.errors import ConfigError


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


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"segment_wise": {"cap": 3}}, r"^mis\.segment_wise\.cap: unknown key"),
        ({"segment_wise": {"enabld": True}}, r"enabld: unknown key; did you mean enabled\?"),
        ({"segment_wise": True}, r"^mis\.segment_wise: got True; expected a mapping of enabled, weight_cap"),
        ({"segment_wise": {"mode": "drop"}},
         r"^mis\.segment_wise\.mode: got 'drop'; choose one of .*truncate, .*zero"),
        ({"segment_wise": {"too_old": "error"}},
         r"^mis\.segment_wise\.too_old: got 'error'; choose one of raise, drop"),
        ({"segment_wise": {"weight_cap": "high"}}, r"^mis\.segment_wise\.weight_cap: got 'high'; expected a number"),
        ({"segment_wise": {"weight_cap": 0}}, r"^mis\.segment_wise\.weight_cap: got 0; every ratio is above 0"),
        ({"weight": {"upper": 1e-46}}, r"^mis\.weight\.upper: got 1e-46; every ratio is above 0"),
        ({"segment_wise": {"mode": "clip", "weight_floor": 6}},
         r"^mis\.segment_wise\.weight_floor: 6 is not below mis\.segment_wise\.weight_cap: 5"),
        ({"segment_wise": {"weight_floor": 0.2}},
         r"^mis\.segment_wise\.weight_floor: 0\.2 has no effect with mis\.segment_wise\.mode: truncate"),
        ({"segment_wise": {"weight_cap": 0.5, "mode": "clip"}},
         r"weight_floor: unset means 1 / mis\.segment_wise\.weight_cap: 2, not below mis\.segment_wise\.weight_cap"),
        ({"segment_wise": {"weight_cap": None, "weight_floor": 0.5}},
         r"^mis\.segment_wise\.weight_floor: 0\.5 has no effect"),
        ({"segment_wise": {"weight_cap": None, "mode": "zero"}},
         r"^mis\.segment_wise\.mode: zero needs a mis\.segment_wise\.weight_cap"),
        ({"segment_wise": {"method": "loglinear", "too_old": "drop"}},
         r"^mis\.segment_wise\.too_old: drop has no effect with mis\.segment_wise\.method: loglinear"),
        ({"segment_wise": {"enabled": False, "fresh_tokens": "behavior"}},
         r"^mis\.segment_wise\.fresh_tokens: behavior has no effect with mis\.segment_wise\.enabled: false"),
        ({"segment_wise": {"enabled": False, "clip_against": "proximal"}},
         r"^mis\.segment_wise\.clip_against: proximal has no effect with mis\.segment_wise\.enabled: false"),
        ({"weight": {}, "segment_wise": {"weight_cap": 5.0}},
         r"^mis\.segment_wise\.weight_cap: has no effect beside mis\.weight, which has bounds"),
        ({"weight": {}, "segment_wise": {"mode": "truncate"}}, r"^mis\.segment_wise\.mode: has no effect beside"),
        ({"weight": None, "segment_wise": {}}, r"^mis\.weight: null contradicts mis\.segment_wise"),
        ({"weight": {"level": "geometric"}, "segment_wise": {}},
         r"^mis\.weight\.level: geometric beside mis\.segment_wise, which weighs each token by itself; use token"),
        ({"segment_wise": {}, "objective": {"old": "behavior"}},
         r"^mis\.segment_wise: a weight pi_\{v\+1\} / mu belongs to mis\.objective\.old: proximal"),
        ({"segment_wise": {"enabled": False, "mode": "clip"}, "objective": {"old": "behavior"}},
         r"^mis\.segment_wise\.mode: has no effect with mis\.objective\.old: behavior"),
        ({"segment_wise": {"mode": "mask"}, "on_all_rejected": "keep"},
         r"keep cannot give back what mis\.segment_wise\.mode: mask takes.*mis\.segment_wise\.mode: clip"),
    ],
)  # fmt: skip
def test_what_cannot_work_quotes_the_key(mapping: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        from_mapping(mapping)


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
