"""`docs/metrics.md` is what the metrics say of themselves, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.metrics.catalogue import DIALOGUE, METRICS, PERCENTILES, RULES, SECTIONS, TAILS, VERSIONS
from mis_plugins.metrics.docs import FAMILIES, cells_of, document
from mis_plugins.metrics.hook_names import BY_STEP
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


def test_the_committed_document_is_the_generated_one():
    committed = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert committed == document(), "python -m mis_plugins.metrics.docs > docs/metrics.md"


@pytest.mark.parametrize("name", EVERY)
def test_every_metric_says_what_it_is_and_what_to_do(name: str):
    assert all(cells_of(EVERY[name])), name


def test_every_metric_stands_in_one_section():
    listed = [name for metrics in SECTIONS.values() for name in metrics]
    assert sorted(listed) == sorted(METRICS)
    families = [metrics for _, metrics in FAMILIES.values()]
    assert families == [PERCENTILES, TAILS, RULES, VERSIONS, DIALOGUE, WEIGHT_METRICS, ROUTED, SPLIT, RESPLIT]


def test_every_metric_of_the_hook_that_mis_py_lacks_has_its_row():
    """The rows name step metrics that exist, and every name that a config can give."""
    rules = [{"over": over, "lower": 0.5, "upper": 2.0} for over in ("token", "mean")] * 2
    vetoes = [{"over": "min", "lower": 1e-4}] * 2
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


def _hook_names(config: CorrectionConfig) -> set[str]:
    kinds = catalogue(config)
    return {*kinds.token, *kinds.sequence, *kinds.micro_batch}


def test_what_the_peers_have_is_ours_too():
    ours = {name for names in PEERS.values() for name in names.values()}
    assert ours <= set(EVERY)
