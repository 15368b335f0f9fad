"""prime-rl's toml, translated: its loss by its formula, since no package index has it."""

import re

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peers.rows import Rows, assert_all_close, keep_away, ours, rows, surrogate_loss
from tolerances import DECISION
from torch import Tensor

from mis_plugins.explain.translate.prime_rl import translate
from mis_plugins.loss.objective import Clip


def their_gradient(batch: Rows, drops: Tensor, kl_tau: float = 1e-3) -> Tensor:
    """-A pi_theta / mu over the tokens that are left, and kl_tau (log r)^2 over all, differentiated."""
    log_ratio = batch.pad(batch.target) - batch.behavior
    slope = torch.where(drops, 0, -batch.token_advantages * log_ratio.exp())
    return (slope + 2 * kl_tau * log_ratio) * batch.mask


def our_gradient(batch: Rows, text: str) -> Tensor:
    """By the config and the flags that the translation prints."""
    made = translate(text)
    mapping: dict = {"weight": None} | dict(made.mis) | {"metrics": "none"}
    flags = re.findall(r"--eps-clip\S* (\S+)", " ".join(made.notes))
    keep_away(batch, mapping, batch.target)
    correction = ours(batch, mapping, batch.target)
    target = batch.pad(batch.target).requires_grad_()
    clip = Clip(*map(float, flags or (0.2, 0.2)))
    tokens = surrogate_loss(batch, target, batch.behavior, correction, mapping["objective"], clip)
    return torch.autograd.grad(tokens.sum(), target)[0]


@settings(max_examples=40)
@given(
    batch=rows(),
    low=st.sampled_from([0.001, 0.1]),
    high=st.sampled_from([0.002, 0.2]),
    kl_tau=st.sampled_from([0, 0.5]),
)
def test_the_default_loss_has_its_gradient(batch: Rows, low: float, high: float, kl_tau: float):
    moved = batch.pad(batch.target).exp() - batch.behavior.exp()
    assume(all(((moved.abs() - bound).abs() > DECISION).all() for bound in (low, high)))
    drops = torch.where(batch.token_advantages > 0, moved > high, moved < -low)
    found = our_gradient(batch, f"[loss]\ndppo_mask_low = {low}\ndppo_mask_high = {high}\nkl_tau = {kl_tau}")
    theirs = their_gradient(batch, drops, kl_tau)
    assert_all_close(found, theirs, batch.rtol, "gradient", atol=batch.rtol * 1e-12)


@settings(max_examples=40)
@given(batch=rows(), threshold=st.sampled_from([0.001, 0.1]))
def test_ipo_has_its_gradient(batch: Rows, threshold: float):
    moved = (batch.pad(batch.target).exp() - batch.behavior.exp()).abs()
    assume(((moved - threshold).abs() > DECISION).all())
    found = our_gradient(batch, f'[loss]\ntype = "ipo"\nipo_threshold = {threshold}')
    assert_all_close(found, their_gradient(batch, moved > threshold), batch.rtol, "gradient", atol=batch.rtol * 1e-12)
