"""Score centering in the embedded host: its engine names the likeliest tokens, and all layouts of ranks train alike."""

from pathlib import Path

import pytest
import torch
from test_local_loop import LOSS_HOOK, configured
from test_local_parallel import RTOL, Grid, assert_same_run, drawn, relative, train
from test_local_parallel import settings as grid_settings

from lab.host.rollout.sampler import Rollout

NAMED = 6
BOUND = "weight: {level: token, bound: truncate, upper: 1.1}, objective: {old: behavior, surrogate: reinforce}"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    """A rollout of the int3 engine, which names a part of the vocabulary at each position."""
    file = tmp_path_factory.mktemp("config") / "plain.yaml"
    configured(file, f"{{{BOUND}}}")
    return drawn(grid_settings(Grid(), file), "int3", NAMED)


def test_the_engine_names_its_likeliest_tokens(named: Rollout) -> None:
    """The likeliest come first, and a sampled token among them has the log-prob that it was sampled with."""
    inside = 0
    for sample in named.samples:
        ids, log_probs = sample.rollout_topk_token_ids, sample.rollout_topk_log_probs
        assert ids is not None and log_probs is not None and sample.rollout_log_probs is not None
        assert ids.shape == log_probs.shape == (sample.response_length, NAMED)
        assert torch.equal(log_probs, log_probs.sort(-1, descending=True).values)
        assert (log_probs.exp().sum(-1) < 1).all()
        tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
        for t, (token, log_prob) in enumerate(zip(tokens, sample.rollout_log_probs, strict=True)):
            found = log_probs[t][ids[t] == token].tolist()
            assert found == [log_prob] if found else log_prob <= float(log_probs[t].min())
            inside += len(found)
    assert 0 < inside < sum(sample.response_length for sample in named.samples)


def test_four_centered_steps_agree_in_every_layout(named: Rollout, tmp_path: Path) -> None:
    """The term changes the gradient, and not by the layout of ranks."""
    files = {name: tmp_path / f"{name}.yaml" for name in ("centered", "plain")}
    configured(files["centered"], f"{{metrics: full, center: {{top_k: {NAMED}}}, {BOUND}}}")
    configured(files["plain"], f"{{metrics: full, {BOUND}}}")
    flags = f"{LOSS_HOOK} --rollout-top-logprobs-num {NAMED}"
    one = train(grid_settings(Grid(), files["centered"], flags), named, tmp_path / "one")
    many = train(grid_settings(Grid(tp=2, cp=2), files["centered"], flags), named, tmp_path / "many")
    assert_same_run(many, one)
    plain = train(grid_settings(Grid(), files["plain"], flags), named, tmp_path / "plain", count=1)
    assert relative(plain["steps"][0][1], one["steps"][0][1]) > 1000 * RTOL
    measured = [step[0]["center_drift"] for step in (plain["steps"][0], one["steps"][0])]
    assert measured[0] == pytest.approx(measured[1]) and measured[0] > 0
