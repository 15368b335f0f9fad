"""What a window costs: masked gradients against the loss of the kept responses alone, and the predicted share."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab import real_model_rl, real_model_window
from lab.real_model import lost
from lab.real_model.arms import ARMS
from lab.real_model.correction import NONE, loss
from lab.real_model.lost import Scope, measured
from lab.real_model.policy import Batch
from lab.real_model.task import of_letters
from lab.real_model.unit import Unit
from mis_plugins.errors import UserError
from true_on_policy.models.tiny import checkpoint, read_config

SCOPE = Scope(policies=(0, 1), prompts=4, reference=8, samples=8, sets=2, draws=3)


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Unit:
    source = checkpoint("tiny-llama", tmp_path_factory.mktemp("model") / "tiny", torch.float32, seed=0)
    task = of_letters(read_config(source).eos_token_id)
    recipe = replace(real_model_rl.SMOKE, lr=1e-3)
    return Unit.start(ARMS["int5-none"], 0, recipe, task, source)


def test_a_masked_gradient_is_that_of_the_kept_responses(unit: Unit):
    problems = unit.problems("direction", 0, 4)
    batches = unit.sampled(unit.of_arm, problems, 8, "lost", 0)
    advantages = torch.linspace(-1, 1, 32).where(torch.arange(32) % 5 > 0, 0)
    masks = torch.stack([torch.ones(32), torch.arange(32) % 3 == 0]).double()
    watched = list(unit.trainer.model.model.layers[-1:].parameters())
    found = lost.masked_sums(unit, watched, batches, advantages, masks)
    for row, mask in zip(found, masks, strict=True):
        parts = (advantages * mask).float().split(unit.recipe.batch)
        total = torch.zeros_like(row)
        for batch, part in zip(batches, parts, strict=True):
            log_probs = unit.trainer.log_probs(batch.prompts, batch.tokens)
            total += torch.cat(
                [one.flatten() for one in torch.autograd.grad(loss(NONE, batch, part, log_probs)[0], watched)]
            )
        # Rows that are scored together and rows that are scored alone round to bf16 differently.
        assert torch.cosine_similarity(row, total, dim=0) > 0.999
        assert row.norm() == pytest.approx(float(total.norm()), rel=0.02)


def test_the_reference_weighs_each_response_with_its_whole_ratio(unit: Unit, monkeypatch: pytest.MonkeyPatch):
    rewards = (torch.arange(32) % 3 == 0).float()  # a random model earns none
    monkeypatch.setattr(Unit, "rewards", lambda unit, batches, problems: rewards)
    problems = unit.problems("direction", 0, 4)
    batches = unit.sampled(unit.of_arm, problems, 8, "reference", 0)
    ratios = torch.cat([whole_ratios(unit, batch) for batch in batches])
    assert ratios.max() / ratios.min() > 1.5
    watched = list(unit.trainer.model.model.layers[-1:].parameters())
    advantages = lost.advantages_of(unit, batches, problems)
    wanted = lost.masked_sums(unit, watched, batches, advantages, ratios[None].double())[0]
    found = lost.reference_of(unit, watched, problems, 8, 0)
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.999
    assert found.norm() == pytest.approx(float(wanted.norm()), rel=0.02)


@torch.no_grad()
def whole_ratios(unit: Unit, batch: Batch) -> torch.Tensor:
    log_ratio = unit.trainer.log_probs(batch.prompts, batch.tokens) - batch.behavior
    return log_ratio.where(batch.valid, 0).sum(1).exp()


def test_random_draws_keep_as_many_as_the_window():
    inside = torch.arange(40) < 13
    draws = torch.stack(lost.random_masks(inside, 50, torch.Generator().manual_seed(0)))
    assert (draws.sum(1) == 13).all() and 0.2 < draws[:, 13:].mean() < 0.45


def test_a_window_that_keeps_all_costs_nothing_and_one_that_keeps_none_has_no_direction(unit: Unit):
    told: list[str] = []
    rows = [*measured(unit, SCOPE, (0.0, math.inf), told.append)]
    assert [(row["rollout"], row["set"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert told[2] == "rollout 1 of 1" and len(told) == 5
    for row in rows:
        assert row["kept"] == 1 and row["k3"] > 0
        assert row["window"] == row["all"] and row["random"] == pytest.approx([row["all"]] * 3)
    empty = next(measured(unit, SCOPE, (5.0, 6.0), told.append))
    assert empty["kept"] == empty["window"] == 0 and empty["random"] == [0, 0, 0]


@pytest.mark.parametrize(("k3", "length"), [(1.8e-3, 22.5), (0.05, 10.0)])
def test_the_predicted_share_is_that_of_a_simulation(k3: float, length: float):
    torch.manual_seed(0)
    means = (torch.randn(200_000, dtype=torch.float64) * math.sqrt(2 * k3 / length) - k3).exp()
    share = ((means >= 0.99) & (means <= 1.001)).double().mean()
    error = 4 * math.sqrt(0.25 / len(means))
    assert real_model_window.predicted(k3, length, 0.99, 1.001) == pytest.approx(float(share), abs=error)
    assert real_model_window.predicted(0, length, 0.99, 1.001) == 1


def test_the_command_writes_a_record_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        sys, "argv", ["real_model_window.py", "--smoke", "--output", str(tmp_path / "w.json")]
    )
    assert real_model_window.main() == 0
    page = (tmp_path / "w.md").read_text()
    assert "| rollouts | set | k3 |" in page and "window less random" in page
    assert "rollout 1 of 1" in capsys.readouterr().err and (tmp_path / "w.json").exists()


def test_a_smoke_run_leaves_the_committed_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["real_model_window.py", "--smoke"])
    assert real_model_window.main() == 0
    assert [str(file) for file in Path().rglob("*.json")] == ["runs/real-model-window-smoke.json"]


def test_a_model_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def lost_model(smoke: bool, scratch: Path) -> None:
        raise UserError("--model smollm2-135m: could not be fetched")

    monkeypatch.setattr(real_model_window, "model_of", lost_model)
    monkeypatch.setattr(sys, "argv", ["real_model_window.py", "--output", str(tmp_path / "w.json")])
    assert real_model_window.main() == 2
    assert "error: --model smollm2-135m" in capsys.readouterr().err and not [*tmp_path.iterdir()]
