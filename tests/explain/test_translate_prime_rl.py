"""prime-rl's toml, translated; its loss by its formula, since no package index has it."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peers.rows import Rows, assert_all_close, keep_away, ours, rows, surrogate_loss
from tolerances import DECISION
from torch import Tensor

from mis_plugins.__main__ import load
from mis_plugins.config.loading import preset_path
from mis_plugins.config.model import CorrectionConfig, ObjectiveConfig, RejectRule, WeightConfig
from mis_plugins.explain.translate.prime_rl import translate
from mis_plugins.loss.objective import Clip

WHOLE = "[trainer.model]\nseq_len = 2048\n[orchestrator]\nbatch_size = 8\n"
IPO = CorrectionConfig(
    WeightConfig("token", "none"),
    (RejectRule("abs_prob_diff", "token", upper=0.3),),
    objective=ObjectiveConfig("reinforce", "behavior"),
)


@pytest.mark.parametrize(
    "text", [WHOLE, "[trainer]", "[loss]\nkl_tau = 0", '[trainer.loss]\ntype = "default"']
)
def test_the_default_loss_is_dppo(text: str):
    assert translate(text).config() == load(preset_path("dppo-tv"))


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ('[trainer.loss]\ntype = "ipo"\nipo_threshold = 0.3', ()),
        ('[loss]\ntype = "ipo"', ("--loss.ipo-threshold=0.3",)),
        (WHOLE, ("trainer.loss.type=ipo", "ipo_threshold=0.3")),
    ],
)
def test_ipo_is_a_rule_and_reinforce_against_the_engine(text: str, behind: tuple[str, ...]):
    assert translate(text, behind).config() == IPO


NOTES = [
    (WHOLE, "corrects by default: trainer.loss.type: default, dppo_mask_low: 0.2, dppo_mask_high: 0.2, adv_tau", ""),
    ("[loss]\ndppo_mask_low = 0.1\ndppo_mask_high = 0.3", "--eps-clip 0.1 --eps-clip-high 0.3 --eps-clip-c 1e+09", ""),
    ("[loss]\nkl_tau = 0.002", "kl_tau: 0.002: prime-rl adds kl_tau (log pi_theta - log mu)^2", ""),
    ("[loss]\nkl_tau = 0", "averages over all tokens", "log mu"),
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
    """-A pi_theta / mu over the tokens that are left, differentiated: prime-rl's loss without its KL term."""
    ratio = (batch.pad(batch.target) - batch.behavior).exp()
    return torch.where(drops, 0, -batch.token_advantages * ratio * batch.mask)


def our_gradient(batch: Rows, text: str) -> Tensor:
    """By the config and the flags that the translation prints."""
    made = translate(text)
    mapping = {"weight": None} | dict(made.mis) | {"metrics": "none"}
    flags = re.findall(r"--eps-clip\S* (\S+)", " ".join(made.notes))
    keep_away(batch, mapping, batch.target)
    correction = ours(batch, mapping, batch.target)
    target = batch.pad(batch.target).requires_grad_()
    clip = Clip(*map(float, flags or (0.2, 0.2)))
    tokens = surrogate_loss(batch, target, batch.behavior, correction, mapping["objective"], clip)
    return torch.autograd.grad(tokens.sum(), target)[0]


@settings(max_examples=40)
@given(batch=rows(), low=st.sampled_from([0.001, 0.1]), high=st.sampled_from([0.002, 0.2]))
def test_the_default_loss_has_its_gradient(batch: Rows, low: float, high: float):
    moved = batch.pad(batch.target).exp() - batch.behavior.exp()
    assume(all(((moved.abs() - bound).abs() > DECISION).all() for bound in (low, high)))
    drops = torch.where(batch.token_advantages > 0, moved > high, moved < -low)
    found = our_gradient(batch, f"[loss]\ndppo_mask_low = {low}\ndppo_mask_high = {high}")
    assert_all_close(found, their_gradient(batch, drops), batch.rtol, "gradient", atol=batch.rtol * 1e-12)


@settings(max_examples=40)
@given(batch=rows(), threshold=st.sampled_from([0.001, 0.1]))
def test_ipo_has_its_gradient(batch: Rows, threshold: float):
    moved = (batch.pad(batch.target).exp() - batch.behavior.exp()).abs()
    assume(((moved - threshold).abs() > DECISION).all())
    found = our_gradient(batch, f'[loss]\ntype = "ipo"\nipo_threshold = {threshold}')
    assert_all_close(
        found, their_gradient(batch, moved > threshold), batch.rtol, "gradient", atol=batch.rtol * 1e-12
    )
