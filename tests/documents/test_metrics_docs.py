"""`docs/metrics.md` is what the metrics say of themselves, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.pages.metrics import BY_STEP, FAMILIES, SAID, WORDS, cells_of, document
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.metrics.catalogue import DIALOGUE, METRICS, PERCENTILES, RULES, SECTIONS, TAILS, VERSIONS
from mis_plugins.metrics.metric import Metric
from mis_plugins.metrics.peer_names import PEERS
from mis_plugins.metrics.resplit import RESPLIT
from mis_plugins.metrics.routing import ROUTED, SPLIT
from mis_plugins.metrics.staleness import WEIGHT_METRICS
from mis_plugins.metrics.token_metrics import OF_MIS_PY, catalogue

ROOT = Path(__file__).resolve().parents[2]
EVERY: dict[str, Metric] = (
    METRICS | PERCENTILES | TAILS | RULES | VERSIONS | DIALOGUE | WEIGHT_METRICS | ROUTED | SPLIT | RESPLIT
)

VETO = {"over": "min", "lower": 1e-4}


def test_the_committed_document_is_the_generated_one():
    committed = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert committed == document(), "python -m lab.pages.metrics > docs/metrics.md"


@pytest.mark.parametrize("name", EVERY)
def test_every_metric_says_what_it_is_and_what_to_do(name: str):
    assert all(cells_of(name)), name


def test_no_words_are_of_a_metric_that_is_gone():
    assert WORDS.keys() == EVERY.keys()


def test_every_metric_stands_in_one_section():
    listed = [name for metrics in SECTIONS.values() for name in metrics]
    assert sorted(listed) == sorted(METRICS)
    families = [metrics for _, metrics in FAMILIES.values()]
    assert families == [PERCENTILES, TAILS, RULES, VERSIONS, DIALOGUE, WEIGHT_METRICS, ROUTED, SPLIT, RESPLIT]


def test_every_metric_of_the_hook_that_mis_py_lacks_has_its_row():
    """The rows name step metrics that exist, and every name that a config can give."""
    rules = [{"over": over, "lower": 0.5, "upper": 2.0} for over in ("token", "mean")] * 2
    vetoes = [VETO] * 2
    weights = [
        {"level": level, "bound": bound, "upper": 2.0}
        for level in ("token", "segment", "sequence", "geometric")
        for bound in ("truncate", "clip", "zero")
    ]
    configs = [
        from_mapping({"weight": weight, "reject": rules + vetoes, "metrics": "full"}) for weight in weights
    ]
    found = {name for config in configs for name in _hook_names(config) - OF_MIS_PY}
    named = {name.removeprefix("mis_") for name in BY_STEP} - {"nonfinite_advantages"}
    assert {re.sub(r"_[2-9]$", "_{i}", name) for name in found} == named
    said = {name for words in BY_STEP.values() for name in re.findall("`(.*?)`", words)}
    assert said <= set(EVERY)


def test_every_name_that_a_default_log_lost_says_where_it_went():
    """Names of `metrics: full`, of any weight and rule, less the five of `watch`; their successors exist."""
    rules = [{"over": over, "lower": 0.5, "upper": 2.0} for over in ("token", "mean")] + [VETO]
    weights = [
        {"level": level, "bound": bound, "upper": 2.0, "normalize": {}}
        for level in ("token", "segment", "sequence", "geometric")
        for bound in ("truncate", "clip", "zero", "mask")
    ]
    mappings = [{"weight": weight, "reject": rules} for weight in weights]
    full, watch = (
        {name for mapping in mappings for name in _hook_names(from_mapping(mapping | {"metrics": size}))}
        for size in ("full", "watch")
    )
    listed = {one for names in SAID["vanished"] for part in names.split(", ") for one in _spread(part)}
    lost = {re.sub(r"_[2-9]$", "", name) for name in full - watch}
    assert {name.removeprefix("mis_") for name in listed} - {"ess_ratio"} == lost
    said = {name for words in SAID["vanished"].values() for name in re.findall("`(.*?)`", words)}
    assert said <= set(EVERY)


def _spread(name: str) -> list[str]:
    """`a_{b,c}_d` as a_b_d and a_c_d."""
    found = re.search(r"\{(.*)\}", name)
    return [name.replace(found[0], one) for one in found[1].split(",")] if found else [name]


def _hook_names(config: CorrectionConfig) -> set[str]:
    kinds = catalogue(config)
    return {*kinds.token, *kinds.sequence, *kinds.micro_batch}


def test_what_the_peers_have_is_ours_too():
    ours = {name for names in PEERS.values() for name in names.values()}
    assert ours <= set(EVERY)
