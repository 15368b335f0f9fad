"""`docs/metrics.md` is what the metrics say of themselves, and names what there is."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import make_batch

from lab.pages.metrics import BY_STEP, NUMBERS, PARTS, SAID, WORDS, cells_of, part, sections
from lab.pages.parts import current, named
from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.opsm import Departure
from mis_plugins.correction.pipeline import correct
from mis_plugins.hosts.resplit import RESPLIT
from mis_plugins.hosts.versions.samples import RETRACTED
from mis_plugins.metrics.partials import METRICS, partials
from mis_plugins.metrics.staleness import weights_by_age
from mis_plugins.metrics.token_metrics import OF_MIS_PY, catalogue
from mis_plugins.packing.ragged import Ragged
from mis_plugins.report.readers.curves import PEERS
from mis_plugins.routing.report import BY_CLASS, ROUTED
from mis_plugins.versions.segment_wise import BehaviorWeight, Written

ROOT = Path(__file__).resolve().parents[2]
RULES = [{"over": over, "lower": 0.5, "upper": 2.0} for over in ("token", "mean")]
VETO = {"over": "min", "lower": 1e-4}


def names_of_the_hook(size: str, bounds: str, rules: Sequence[dict], **weight: object) -> set[str]:
    """Every name that the hook gives with these rules and a weight of any level and of these bounds."""
    weights = [
        {"level": level, "bound": bound, "upper": 2.0, **weight}
        for level in ("token", "segment", "sequence", "geometric")
        for bound in bounds.split()
    ]
    configs = [from_mapping({"weight": one, "reject": rules, "metrics": size}) for one in weights]
    return {name for config in configs for name in catalogue(config)}


def names_of_a_step() -> set[str]:
    """Every name that a weight, a rule over tokens, a rule over units and OPSM can give."""
    config = from_mapping({"weight": {"upper": 2.0}, "reject": RULES, "metrics": "all"})
    batch = make_batch([([-1.0], [-1.0], [1])])
    ragged = Ragged(torch.tensor([0, 1]), batch.flat_mask)
    made = correct(batch.proximal[0], batch.behavior[0], ragged, config)
    one = torch.ones(1, dtype=torch.float64)
    made = replace(made, on_policy=batch.flat_mask, departure=Departure(one, one, one, one))
    of_one = {name for _, metrics, _ in partials(made).records for name in metrics}
    written, all_valid = Written(torch.ones(1).long(), one, 1), batch.flat_mask
    by_age = weights_by_age(one, one, one, written, all_valid, BehaviorWeight(one, all_valid))
    of_weights = {name for _, metrics, _ in by_age.records for name in metrics}
    return {*of_one, *of_weights, *METRICS, "rule_1_rejected_fraction"}


PLACES = {"{percent}": r"\d\d", "{side}": "(low|high)", "{bound}": r"[\d.]+", "{i}": r"\d", "{age}": r"\d",
          "{turn}": r"\d"}  # fmt: skip


def pattern(name: str) -> str:
    """The names that a name of the page stands for."""
    for place, values in PLACES.items():
        name = name.replace(place, values)
    return name


EVERY = list(WORDS)
OTHERS = {*ROUTED, *BY_CLASS, *RESPLIT, RETRACTED}


def test_the_committed_document_is_the_generated_one():
    assert current("metrics.md", part), "python -m lab.pages.metrics"
    assert {*named("metrics.md")} == {*NUMBERS, *PARTS, *sections()}


@pytest.mark.parametrize("name", EVERY)
def test_every_metric_says_what_it_is_and_what_to_do(name: str):
    assert all(cells_of(name)), name


def test_each_metric_has_words_and_no_words_are_of_a_metric_that_is_gone():
    found = names_of_a_step() | OTHERS
    said = {name: [words for words in WORDS if re.fullmatch(pattern(words), name)] for name in found}
    assert {name for name, words in said.items() if len(words) != 1} == set()
    assert {one for words in said.values() for one in words} == WORDS.keys()


def test_every_metric_stands_in_one_section():
    found = sections()
    assert [name for names in found.values() for name in names] == list(WORDS)


def test_every_metric_of_the_hook_that_mis_py_lacks_has_its_row():
    """The rows name step metrics that exist, and every name that a config can give."""
    found = names_of_the_hook("full", "truncate clip zero", RULES * 2 + [VETO] * 2) - OF_MIS_PY
    named = {name.removeprefix("mis_") for name in BY_STEP} - {"nonfinite_advantages"}
    assert {re.sub(r"_[2-9]$", "_{i}", name) for name in found} == named
    said = {name for words in BY_STEP.values() for name in re.findall("`(.*?)`", words)}
    assert said <= set(EVERY)


def test_every_name_that_a_default_log_lost_says_where_it_went():
    """Names of `metrics: full`, of any weight and rule, less the five of `watch`; their successors exist."""
    full, watch = (
        names_of_the_hook(size, "truncate clip zero mask", [*RULES, VETO], normalize={}) for size in ("full", "watch")
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


def test_what_the_peers_have_is_ours_too():
    ours = {name for names in PEERS.values() for name in names.values()}
    assert ours <= set(EVERY)
