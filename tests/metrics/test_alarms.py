"""Alarms of the step metrics on log-probs in which the trainer finds everything unlikely, and on their mirror image.

The thresholds are those that `docs/metrics.md` prints: what a metric's `bad` says is above or below a number.
"""

import re

import pytest
import torch
from batches import Batch, make_batch
from slope_simulation import related, sums
from test_partials import step_of, whole_step

from lab.pages.metrics import WORDS
from mis_plugins.config.reading import from_mapping
from mis_plugins.metrics.alarms import everything_rejected, weights_of_one
from mis_plugins.metrics.processed import warnings, warnings_of
from mis_plugins.metrics.slope import cut_off, relation, unlikely

BOUND = re.compile(r"(above|below) (-?\d[\d.e+-]*\d|-?\d)", re.IGNORECASE)
SEQUENCES, TOKENS = 16, 100

TWO_SIDED = [
    "kl_k1", "ratio_mean", "log_prob_diff_abs_mean", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_geometric",
    "log_chi2_sequence", "log_mean_product", "sequence_log_ratio_mean", "sequence_log_ratio_abs_mean", "weight_mean",
    "applied_mean",
]  # fmt: skip
BELOW = ["chi2_token", "chi2_sequence", "reverse_kl_k1", "log_ppl_diff_min", "sequence_log_ratio_max"]
ABOVE = ["chi2_sequence", "log_ppl_diff_max", "sequence_log_ratio_min"]
# Where no token lies on the other side of 1.
ALL_BELOW = ["ratio_max", "weight_max", "kept_log_ratio_max", "sequence_weight_max", "sequence_log_ratio_min"]
ALL_ABOVE = ["ratio_min", "weight_min", "kept_log_ratio_min", "sequence_weight_min", "sequence_log_ratio_max"]


def shifted(shift: float, spread: float = 0.03) -> Batch:
    """log r is normal around `shift`, less what keeps the mean ratio at exp(shift)."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(SEQUENCES):
        behavior = -2 * torch.rand(TOKENS, generator=generator) - 2
        noise = spread * torch.randn(TOKENS, generator=generator) - spread**2 / 2
        rows.append(((behavior + shift + noise).tolist(), behavior.tolist(), [1] * TOKENS))
    return make_batch(rows)


def alarms(shift: float, spread: float = 0.03) -> set[str]:
    found = step_of(shifted(shift, spread), weight={"upper": 2.0})
    return {name for name, value in found.items() if name in WORDS and sounds(WORDS[name]["bad"], value)}


def sounds(bad: str, value: float) -> bool:
    bounds = [(side.lower(), float(number)) for side, number in BOUND.findall(bad)]
    return any(value > bound if side == "above" else value < bound for side, bound in bounds)


@pytest.mark.parametrize("shift", [-0.1, -0.3, -1.0, 0.1, 0.3, 1.0])
def test_a_trainer_that_finds_everything_unlikely_or_likely_sounds_the_alarms(shift: float):
    one_sided, far = (BELOW, ALL_BELOW) if shift < 0 else (ABOVE, ALL_ABOVE)
    silent = {*TWO_SIDED, *one_sided, *(far if abs(shift) > 0.2 else [])} - alarms(shift)
    assert not silent


@pytest.mark.parametrize("shift", [-1.0, -0.1, 0.1, 1.0])
def test_normalization_does_not_hide_it(shift: float):
    """The mean of what is applied is then 1 whatever the ratios are, and the factor tells."""
    weight = {"upper": 2.0, "normalize": {"scope": "micro_batch"}}
    found = step_of(shifted(shift), weight=weight)
    assert not sounds(WORDS["applied_mean"]["bad"], found["applied_mean"])
    assert sounds(WORDS["normalization_factor"]["bad"], found["normalization_factor"])


def test_an_engine_that_matches_sounds_none():
    assert not alarms(0.0, 0.01)


def test_products_that_vanish_are_no_good_sign():
    """Sums of -100 a sequence: their chi-square has a logarithm of -200, which no bound above 0 sees."""
    found = step_of(shifted(-1.0), weight={"level": "sequence"})
    assert found["log_chi2_sequence"] < -100 and sounds(WORDS["log_chi2_sequence"]["bad"], found["log_chi2_sequence"])


@pytest.mark.parametrize("spread", [0.03, 1.5])
def test_the_log_does_not_blame_top_p_alone(spread: float):
    """Whether all ratios shrink alike, which looks like a cut, or few of them carry the mean."""
    batch = shifted(-1.0, spread)
    found = related(*(torch.cat(x).double() for x in (batch.proximal, batch.behavior)))
    assert cut_off(found) == (spread < 1) and unlikely(found) == (spread > 1)
    (message,) = [text for text in warnings(found) if "compare weights, chat template" in text]
    assert ("--rollout-top-p" in message) == cut_off(found)


@pytest.mark.parametrize("shift", [0.3, 1.0])
def test_the_log_says_what_cannot_be_when_all_is_likelier(shift: float):
    batch = shifted(shift)
    found = related(*(torch.cat(x).double() for x in (batch.proximal, batch.behavior)))
    assert any("not sampled from the log-probs" in text for text in warnings(found))


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_trainer_whose_log_probs_have_nothing_to_do_with_the_engines_is_told(spread: float):
    """Other weights: no line relates the two sides, falls or is level, and only the means tell."""
    generator = torch.Generator().manual_seed(1)
    behavior = -2 * torch.rand(20000, dtype=torch.float64, generator=generator)
    proximal = -12 + spread * torch.rand(20000, dtype=torch.float64, generator=generator)
    found = sums(proximal, behavior)
    assert relation(found) is None
    (message,) = warnings_of(found)
    mean = float((proximal - behavior).mean())
    assert message.startswith(f"the mean of log pi_old - log mu over 20000 tokens is {mean:.2f}: the trainer finds")
    assert not warnings_of(sums(behavior[:2] - 5, behavior[:2]))


def test_sides_that_agree_on_tokens_that_do_not_vary_are_not_told():
    certain = torch.full((100,), -1e-3, dtype=torch.float64)
    assert relation(sums(certain, certain)) is None and not warnings_of(sums(certain, certain))


@pytest.mark.parametrize(
    ("rows", "weight", "told"),
    [
        ([[0.3] * 4], {"level": "sequence", "normalize": {}}, True),
        ([[1.5] * 3, [2.0] * 2], {"upper": 2.0, "normalize": {}}, True),
        ([[0.3] * 4], {"level": "sequence"}, False),
        ([[0.0] * 4], {"level": "sequence", "normalize": {}}, False),
        ([[1e-4, -1e-4] * 50], {"upper": 2.0}, False),
        ([[9.0, -9.0, 0.2, 0.1]], {"upper": 1.1, "normalize": {}}, False),
    ],
)  # fmt: skip
def test_a_step_in_which_every_weight_is_one_is_told(rows: list[list[float]], weight: dict, told: bool):
    """A sequence divided by its own weight, and weights that all lie at one cap.

    Not where log-probs are equal, nor where the noise of an engine leaves a mean of 1, nor where weights differ.
    """
    batch = make_batch([([x - 3 for x in row], [-3.0] * len(row), [1] * len(row)) for row in rows])
    config = from_mapping({"weight": weight, "metrics": "all"})
    assert bool(weights_of_one(config, whole_step(batch, config).named_sums)) == told


@pytest.mark.parametrize(
    ("metrics", "where"), [("watch", "train/mis_step/rule_0_rejected_fraction"), ("full", "`mis.metrics: watch`")]
)
def test_what_says_which_rule_rejects_everything_is_in_the_log_or_is_asked_for(metrics: str, where: str):
    config = from_mapping({"metrics": metrics, "weight": None, "reject": [{"upper": 2.0}]})
    assert where in everything_rejected(config, {"all_rejected": 1, "micro_batches": 1, "kept": 0, "valid": 4})


@pytest.mark.parametrize(
    ("dropping", "way_out"),
    [
        ({"reject": [{"upper": 2.0}]}, "; widen the bounds of mis.reject, or see"),
        ({"m2_threshold": 0.04}, "; raise mis.m2_threshold, or see"),
        ({"reject": [{"upper": 2.0}], "m2_threshold": 0.04},
         "; widen the bounds of mis.reject and raise mis.m2_threshold, or see"),
    ],
)  # fmt: skip
def test_what_drops_everything_is_what_shall_drop_less(dropping: dict, way_out: str):
    config = from_mapping({"weight": None} | dropping)
    sums = {"all_rejected": 1, "micro_batches": 1, "kept": 0, "valid": 4}
    assert way_out in everything_rejected(config, sums)


def test_a_step_that_drops_a_sequence_is_corrected_though_the_others_weigh_one():
    batch = make_batch([([x - 3] * 4, [-3.0] * 4, [1] * 4) for x in (0.3, 2.0)])
    weight = {"level": "sequence", "normalize": {"over": "kept"}}
    config = from_mapping({"weight": weight, "reject": [{"over": "mean", "upper": 2}], "metrics": "all"})
    sums = whole_step(batch, config).named_sums
    assert sums["kept/normalized"] == sums["kept"] == 4 and not weights_of_one(config, sums)
