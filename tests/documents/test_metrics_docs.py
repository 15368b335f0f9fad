"""`docs/metrics.md` is what the metrics say of themselves, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mis_plugins.metrics.catalogue import METRICS, PERCENTILES, RULES, SECTIONS, TAILS, VERSIONS
from mis_plugins.metrics.docs import FAMILIES, cells_of, document
from mis_plugins.metrics.metric import Metric
from mis_plugins.metrics.peer_names import PEERS
from mis_plugins.metrics.staleness import WEIGHT_METRICS

ROOT = Path(__file__).resolve().parents[2]
EVERY: dict[str, Metric] = METRICS | PERCENTILES | TAILS | RULES | VERSIONS | WEIGHT_METRICS


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
    assert families == [PERCENTILES, TAILS, RULES, VERSIONS, WEIGHT_METRICS]


def test_what_the_peers_have_is_ours_too():
    ours = {name for names in PEERS.values() for name in names.values()}
    assert ours <= set(EVERY)


def test_metrics_that_are_named_in_advice_exist():
    """A word with an underscore in advice is a metric, a setting or a family."""
    known = {*EVERY, *(re.sub(r"_p\{percent\}|_\{\w+\}", "", name) for name in EVERY)}
    settings = {
        "segment_wise",
        "fresh_tokens",
        "keep_floor",
        "on_all_rejected",
        "abs_prob_diff",
        "log_prob",
        "filter_samples",
    }
    for name, metric in EVERY.items():
        text = " ".join(cells_of(metric))
        words = {word.strip("`.,;:()") for word in text.split()}
        named = {word for word in words if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", word)}
        families = {
            word for word in named if word.startswith(("rule_i_", "pi_old", "sum_t", "mean_t", "prod_t"))
        }
        unknown = {word for word in named - known - settings - families if word not in SYMBOLS}
        assert not unknown, (name, unknown)


SYMBOLS = {"r_t", "w_t", "loss_t", "log_r", "prob_diff", "pi_old", "pi_v", "pi_theta"}
