"""The detector of log-probs processed on one side: what it finds in simulated ones, and where it keeps quiet."""

import math

import pytest
import slope_simulation as simulation
import torch
from slope_simulation import BF16, INT3, INT8, KINDS, Error, Kind, found_in, related, sums

from mis_plugins.metrics.processed import warnings
from mis_plugins.metrics.slope import cut_off, is_suspect, not_sampled_from, relation, scaled

TOKENS = 20000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0.0, BF16, INT8, INT3])
def test_matched_engines_raise_no_alarm(kind: Kind, noise: float):
    found = found_in(kind, Error(noise), TOKENS)
    assert warnings(found) == []
    assert found.nearest == pytest.approx(1, abs=0.002 if noise < INT3 else 0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.2])
def test_a_temperature_of_the_engine_alone(kind: Kind, temperature: float):
    """Its side of 1, never further from 1 than it is, nor less than a fifth as far."""
    found = found_in(kind, Error(temperature=temperature), TOKENS)
    assert scaled(found) and not not_sampled_from(found) and not cut_off(found)
    off = (found.implied_temperature - 1) / (temperature - 1)
    assert 0.2 < off < 1.05
    (message,) = warnings(found)
    assert "the rollout engine's log-probs alone" in message and "--rollout-temperature" in message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.2])
def test_raw_log_probs_of_an_engine_that_samples_at_a_temperature(kind: Kind, temperature: float):
    found = found_in(kind, Error(temperature=temperature, side="trainer"), TOKENS)
    assert scaled(found) and not_sampled_from(found) and not cut_off(found)
    assert 0.2 < (1 / found.implied_temperature - 1) / (temperature - 1) < 1.05
    first, second = warnings(found)
    assert "not sampled from the log-probs" in first and "the trainer's log-probs alone" in second


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_p", [0.9, 0.95])
def test_a_nucleus_of_the_engine_alone(kind: Kind, top_p: float):
    """The offset of each token is at most log(1 / p), and the mean ratio is the mass that is left."""
    found = found_in(kind, Error(top_p=top_p), TOKENS)
    assert cut_off(found) and not scaled(found) and not not_sampled_from(found)
    assert top_p <= found.mean_ratio < 1 - (1 - top_p) / 4
    (message,) = warnings(found)
    assert f"{found.mean_ratio:.1%} of the probability mass" in message and "--rollout-top-p" in message


def test_a_nucleus_that_both_sides_leave_out_of_their_log_probs_cannot_be_seen():
    """Sampling from the nucleus, but both report the whole distribution: the same log-probs on either side."""
    proximal, _ = simulation.simulate("mixed", Error(0.0, top_p=0.9), TOKENS)
    assert warnings(related(proximal, proximal)) == []


def test_lines_are_found_exactly():
    x = -torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5
    found = related(0.7 * x - 0.1, x)
    assert found.slope == pytest.approx(0.7) and found.inverse == pytest.approx(0.7)
    assert found.implied_temperature == pytest.approx(0.7)
    assert found.slope_error == pytest.approx(0, abs=1e-6)


def test_a_handful_of_tokens_tells_no_temperature():
    """One unlikely token among certain ones is a line of its own, without any residual."""
    x = torch.full((1000,), -1e-4, dtype=torch.float64)
    x[0] = -4.0
    y = x.clone()
    y[0] = -4.15
    found = related(y, x)
    assert found.slope == pytest.approx(1.0375, abs=1e-3)
    assert not warnings(found)


def test_noise_of_the_trainer_brackets_one():
    """Noise on one side alone flattens one slope and steepens the inverse of the other."""
    generator = torch.Generator().manual_seed(0)
    x = -3 * torch.rand(50000, dtype=torch.float64, generator=generator)
    y = x + 0.3 * torch.randn(50000, dtype=torch.float64, generator=generator)
    found = related(y, x)
    assert found.slope < 1.01 and found.inverse > 1.05
    assert found.nearest == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("proximal", [[], [-1.0, -2.0], [-1.0] * 5, [-1.0, -2.0, -3.0, -4.0]])
def test_what_tells_nothing_tells_nothing(proximal: list[float]):
    """Too few tokens, none that varies, or a relation that falls."""
    y = torch.tensor(proximal, dtype=torch.float64)
    assert relation(sums(y, -5 - y)) is None


@pytest.mark.parametrize(("apart", "tells"), [(-0.9, False), (-1.1, True), (1.1, False)])
def test_the_means_tell_where_no_line_does(apart: float, tells: bool):
    x = torch.full((5,), -2.0, dtype=torch.float64)
    assert is_suspect(sums(x + apart, x)) == tells


def test_heavy_tails_are_not_taken_for_a_cut():
    """Where few ratios carry the mean, that it is low says nothing."""
    log_ratio = 3 * torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 4.5
    x = -6 * torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 10
    found = related(x + log_ratio, x)
    assert math.isfinite(found.mean_ratio)
    assert not cut_off(found)
