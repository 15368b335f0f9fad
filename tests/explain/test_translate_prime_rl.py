"""prime-rl's toml, translated; its loss by its formula, since no package index has it."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peers.rows import Rows, assert_all_close, ours, rows, surrogate_loss
from tolerances import DECISION
from torch import Tensor

from mis_plugins.__main__ import load
from mis_plugins.config.loading import preset_path
from mis_plugins.explain.translate.prime_rl import translate
from mis_plugins.loss.objective import Clip

KL_TAU = 0.02
WHOLE = "[trainer.model]\nseq_len = 2048\n[orchestrator]\nbatch_size = 8\n"


@pytest.mark.parametrize(
    "text", [WHOLE, "[trainer]", "[loss]\nkl_tau = 0.001", '[trainer.loss]\ntype = "default"']
)
def test_the_default_loss_is_dppo_with_a_penalty(text: str):
    assert translate(text).config() == load(preset_path("prime-rl-dppo"))


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ('[trainer.loss]\ntype = "ipo"\nipo_threshold = 0.1', ()),
        ('[loss]\ntype = "ipo"', ("--loss.ipo-threshold=0.3",)),
        (WHOLE, ("trainer.loss.type=ipo", "kl_tau=1e-3")),
    ],
)
def test_ipo_is_a_surrogate(text: str, behind: tuple[str, ...]):
    assert translate(text, behind).config() == load(preset_path("prime-rl-ipo"))


def test_a_penalty_of_0_is_none():
    assert translate("[loss]\nkl_tau = 0").config() == load(preset_path("dppo-tv"))


NOTES = [
    (WHOLE, "corrects by default: trainer.loss.type: default, dppo_mask_low: 0.2, dppo_mask_high: 0.2, adv_tau", ""),
    ("[loss]\ndppo_mask_low = 0.1\ndppo_mask_high = 0.3", "--eps-clip 0.1 --eps-clip-high 0.3 --eps-clip-c 1e+09", ""),
    ('[loss]\ntype = "ipo"\nipo_threshold = 0.3', "ipo_threshold: pass --eps-clip 0.3 --eps-clip-high 0.3 --eps", ""),
    ("[loss]\nkl_tau = 0", "averages over all tokens", "kl_tau"),
    ("[loss]\nadv_tau = 2", "adv_tau: 2 multiplies the advantages", ""),
    ("[loss]\nadv_tau = 1.0", "", "multiplies the advantages"),
    ("[orchestrator]\nmax_off_policy_steps = 8", "orchestrator.max_off_policy_steps: bounds the age of a rollout", ""),
    ("[trainer]\nenable_router_replay = true", "trainer.enable_router_replay: replays the engine's routes", ""),
    ('[[orchestrator.train.source]]\nalgo = {type = "opd"}', "algo.type: opd: drops tokens whose probability fell", ""),
    ('[orchestrator.algo]\ntype = "grpo"', "", "algo.type"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "unsaid"), NOTES)
def test_notes(text: str, said: str, unsaid: str):
    told = " ".join(translate(text).notes)
    assert said in told and (not unsaid or unsaid not in told)


def their_gradient(batch: Rows, drops: Tensor) -> Tensor:
    """Of -A pi_theta / mu over the tokens that are left, plus kl_tau (log pi_theta - log mu)^2 over all of them."""
    log_ratio = batch.pad(batch.target) - batch.behavior
    pushed = torch.where(drops, 0, -batch.token_advantages * log_ratio.exp())
    return (pushed + 2 * KL_TAU * log_ratio) * batch.mask


def our_gradient(batch: Rows, text: str) -> Tensor:
    """By the config and the flags that the translation prints."""
    made = translate(f"{text}\nkl_tau = {KL_TAU}")
    mapping = {"weight": None} | dict(made.mis) | {"metrics": "none"}
    clip = Clip(*map(float, re.findall(r"--eps-clip\S* (\S+)", " ".join(made.notes))))
    target = batch.pad(batch.target).requires_grad_()
    correction = ours(batch, mapping, batch.target)
    tokens = surrogate_loss(batch, target, batch.behavior, correction, mapping["objective"], clip)
    return torch.autograd.grad(tokens.sum(), target)[0]


@settings(max_examples=40)
@given(batch=rows(), low=st.sampled_from([0.001, 0.1]), high=st.sampled_from([0.002, 0.2]), ipo=st.booleans())
def test_each_loss_has_its_gradient(batch: Rows, low: float, high: float, ipo: bool):
    moved = batch.pad(batch.target).exp() - batch.behavior.exp()
    assume(all(((moved.abs() - bound).abs() > DECISION).all() for bound in (low, high)))
    drops = moved.abs() > low if ipo else torch.where(batch.token_advantages > 0, moved > high, moved < -low)
    of_dppo, of_ipo = (
        f"dppo_mask_low = {low}\ndppo_mask_high = {high}",
        f'type = "ipo"\nipo_threshold = {low}',
    )
    found, wanted = our_gradient(batch, f"[loss]\n{of_ipo if ipo else of_dppo}"), their_gradient(batch, drops)
    size = float((batch.pad(batch.target) - batch.behavior).abs().max())
    assert_all_close(found, wanted, batch.rtol, "gradient", atol=batch.rtol * (1 + size))
