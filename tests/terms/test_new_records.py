"""One record is all that a new statistic, bound, metric or preset takes, from a YAML file to the loss and to words."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from commands import ConfigCommand

from mis_plugins.__main__ import main
from mis_plugins.config import loading
from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.reading import from_mapping
from mis_plugins.config.terms.bounds import BOUNDS, Bound
from mis_plugins.config.terms.statistics import STATISTICS, Statistic
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.errors import ConfigError
from mis_plugins.explain.formula import formula
from mis_plugins.explain.words import describe
from mis_plugins.metrics.token_metrics import diagnose
from mis_plugins.packing.ragged import Ragged

SQUARE = Statistic(
    value=lambda token: (token.proximal.exp() - token.behavior.exp()).square(),
    low=0,
    high=1,
    formula="({trainer} - mu)^2",
    words="squared probability difference ({trainer} - mu)^2",
    reads_probabilities=True,
)
INVERSE = Statistic(
    value=lambda token: -token.log_ratio,
    low=0,
    high=math.inf,
    formula="1 / r_t",
    words="inverse ratio",
    on_policy=1,
    factor="1/r",
)
ROOT = Bound(
    apply=lambda ratio, floor, ceiling: ratio.clamp(max=ceiling).sqrt(),
    outside="weighed",
    formula="sqrt(min({ratio}, {upper}))",
    words="capped at {upper}, under a root",
    has_floor=False,
)
PROXIMAL = (0.9, 0.2, math.nan, 0.5, 0.6, 0.5)
BEHAVIOR = (0.1, 0.3, 0.5, 0.5, 0.5, 0.4)
LENGTHS = (4, 2)


@pytest.fixture(autouse=True)
def new_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATISTICS, "square_prob_diff", SQUARE)
    monkeypatch.setitem(STATISTICS, "inverse_ratio", INVERSE)
    monkeypatch.setitem(BOUNDS, "root", ROOT)
    for outside in ("zeroed", "dropped"):
        record = dataclasses.replace(ROOT, outside=outside, has_floor=True, monotone=outside != "zeroed")
        monkeypatch.setitem(BOUNDS, f"root_{outside}", record)


def read(text: str) -> CorrectionConfig:
    return from_mapping(yaml.safe_load(text))


def corrected(config: CorrectionConfig) -> Correction:
    starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    ragged = Ragged(starts, torch.ones(sum(LENGTHS), dtype=torch.bool))
    return correct(torch.tensor(PROXIMAL).log(), torch.tensor(BEHAVIOR).log(), ragged, config)


def values(of_token: Callable[[float, float], float], sequence: slice) -> list[float]:
    pairs = zip(PROXIMAL[sequence], BEHAVIOR[sequence], strict=True)
    return [of_token(pi, mu) for pi, mu in pairs if not math.isnan(pi)]


def test_a_statistic_of_tokens(config_command: ConfigCommand):
    mis = "{weight: null, reject: [{statistic: square_prob_diff, upper: 0.25}], metrics: all}"
    config = read(mis)
    correction = corrected(config)
    assert correction.keep.tolist() == [False, True, False, True, True, True]
    found = correction.stage.statistic("square_prob_diff")
    assert found[2] == 0, "not usable, and the statistic reads probabilities"
    kept = [0.0 if math.isnan(pi) else (pi - mu) ** 2 for pi, mu in zip(PROXIMAL, BEHAVIOR, strict=True)]
    torch.testing.assert_close(found, torch.tensor(kept))
    assert dict(diagnose(correction))["mis_rs_mask_fraction_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert "keep_t = mask_t and (pi_old - mu)^2 <= 0.25" in formula(config)
    told = "reject: tokens whose squared probability difference (pi_old - mu)^2 is above 0.25"
    assert told in describe(config) and told in config_command(f"mis: {mis}").out


AGGREGATED: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": lambda each: sum(each) / len(each),
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("over", AGGREGATED)
def test_a_statistic_over_sequences(over: str):
    square: Callable[[float, float], float] = lambda pi, mu: (pi - mu) ** 2  # noqa: E731
    each = values(square, slice(LENGTHS[0], None))
    value = AGGREGATED[over](each)
    for upper, kept in ((value * 1.01, True), (value * 0.99, False)):
        rule = {"statistic": "square_prob_diff", "over": over, "upper": upper}
        keep = corrected(from_mapping({"weight": None, "reject": [rule]})).keep
        assert keep.tolist() == [False] * 4 + [kept] * 2, "the first sequence has a token that is not usable"


def test_a_statistic_that_multiplies(config_command: ConfigCommand):
    """1/r over the second sequence is 5/6 * 4/5 = 2/3, and its bounds are those of a ratio."""
    for lower, kept in ((0.66, True), (0.67, False)):
        mis = f"{{weight: null, reject: [{{statistic: inverse_ratio, over: sum, lower: {lower}}}], metrics: all}}"
        correction = corrected(read(mis))
        assert correction.keep.tolist()[4:] == [kept] * 2
        assert f"keep_t = mask_t and {lower:g} <= prod 1/r" in formula(read(mis))
        told = f"reject: sequences whose inverse ratio (product over tokens) is below {lower:g}"
        assert told in config_command(f"mis: {mis}").out
    with pytest.raises(ConfigError, match="a ratio is never below 0"):
        read("{weight: null, reject: [{statistic: inverse_ratio, lower: -1}]}")


def test_a_statistic_is_held_to_its_range_and_its_value_on_policy():
    with pytest.raises(ConfigError, match=r"got 2; square_prob_diff over token lies between 0 and 1"):
        read("{weight: null, reject: [{statistic: square_prob_diff, upper: 2}]}")
    with pytest.raises(ConfigError, match=r"choose one of ratio, .*, square_prob_diff, inverse_ratio"):
        read("{weight: null, reject: [{statistic: square_diff, upper: 0.5}]}")
    config = read("{weight: null, reject: [{statistic: square_prob_diff, lower: 0.5}]}")
    assert "there its square_prob_diff is 0, which is outside [0.5, inf]" in describe(config)


def test_a_bound(config_command: ConfigCommand):
    mis = "{weight: {level: token, bound: root, upper: 2}, metrics: all}"
    config = read(mis)
    correction = corrected(config)
    root = lambda pi, mu: 0.0 if math.isnan(pi) else math.sqrt(min(pi / mu, 2))  # noqa: E731
    expected = [root(*pair) for pair in zip(PROXIMAL, BEHAVIOR, strict=True)]
    torch.testing.assert_close(correction.weights, torch.tensor(expected))
    assert correction.keep.all()
    metrics = dict(diagnose(correction))
    assert metrics["mis_tis_root_fraction"].sum() == 1, "0.9 / 0.1"
    assert metrics["mis_is_ratio_max_final"][0].item() == pytest.approx(math.sqrt(2))
    assert "w_t    = sqrt(min(r_t, 2))" in formula(config)
    told = "weight: the ratio of each token, pi_old / mu, capped at 2, under a root"
    assert told in describe(config) and told in config_command(f"mis: {mis}").out


@pytest.mark.parametrize("outside", ["zeroed", "dropped"])
def test_a_bound_that_gives_no_weight_outside(outside: str):
    config = read(f"{{weight: {{bound: root_{outside}, upper: 2, normalize: {{}}}}, metrics: all}}")
    correction = corrected(config)
    inside = [not math.isnan(pi) and 0.5 <= pi / mu <= 2 for pi, mu in zip(PROXIMAL, BEHAVIOR, strict=True)]
    assert correction.keep.tolist() == (inside if outside == "dropped" else [True] * 6)
    root = [math.sqrt(pi / mu) if within else 0 for pi, mu, within in zip(PROXIMAL, BEHAVIOR, inside, strict=True)]
    mean = sum(root) / (sum(inside) if outside == "dropped" else 5)
    factor = torch.where(correction.keep, correction.weights, 0)
    torch.testing.assert_close(factor, torch.tensor(root) / mean)
    metrics = dict(diagnose(correction))
    assert metrics[f"mis_tis_root_{outside}_fraction_high"].sum() == 1, "0.9 / 0.1"
    assert metrics["mis_weight_max_mb"][0].item() == pytest.approx(math.sqrt(5 / 4) / mean)
    assert metrics["mis_is_ratio_max_final"][4].item() == pytest.approx(math.sqrt(5 / 4) / mean)


def test_a_bound_is_held_to_its_sides(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"lower: 0\.5 has no effect with mis\.weight\.bound: root; drop it"):
        read("{weight: {bound: root, lower: 0.5}}")
    with pytest.raises(ConfigError, match=r"choose one of none, .*, root, "):
        read("{weight: {bound: roots}}")
    assert read("{segment_wise: {mode: root}}").weight == read("{weight: {bound: root, upper: 5}}").weight


def test_a_preset_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "made-up.yaml").write_text("use_tis: true\nmis: {weight: {bound: root, upper: 3}}\n")
    monkeypatch.setattr(loading, "_preset_folder", lambda: tmp_path)
    assert main(["config", "check", "made-up"]) == 0
    assert "capped at 3, under a root" in capsys.readouterr().out
    assert main(["config", "check", "made-upp"]) == 2 and "made-up" in capsys.readouterr().err
