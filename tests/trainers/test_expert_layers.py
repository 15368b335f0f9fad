"""Megatron's layer of experts: bits of the agreed order, what each alignment is for, and gradients under a replay."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from alignments import rows_of_the_page
from expert_alignments import COMPLETE, LEFT_OUT, Case, counts
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.kernels.pin import pinned

TOKENS = 256


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    return counts(Case.random(128, 8, TOKENS))


def test_in_the_agreed_order_every_token_has_the_bits_of_the_formula(found: dict[str, int]) -> None:
    assert found[COMPLETE] == TOKENS


@pytest.mark.parametrize("what", LEFT_OUT)
def test_without_an_alignment_tokens_differ(found: dict[str, int], what: str) -> None:
    assert found[what] < TOKENS


def test_every_row_of_the_contract_has_an_experiment() -> None:
    assert {row for row, _ in LEFT_OUT.values()} == set(rows_of_the_page("## Mixtures of experts"))


def gradients(case: Case) -> dict[str, Any]:
    """Compute the gradient of every weight; an optimizer skips a weight whose gradient is None."""
    case.layer.zero_grad()
    output = case.output()
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float32).view_as(output)
    (output.float() * weights).sum().backward()
    found = {name: weight.grad for name, weight in case.layer.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return found


def test_a_replay_of_the_engines_routes_gives_the_same_bits_and_gradients() -> None:
    """The replay is Megatron's own; the routes are those that the layer chooses by itself, as on policy."""
    case = Case.random(8, 2, 64, replay=True)
    replay = case.layer.router.router_replay
    with pinned(Contract(dtype="bf16")):
        own = gradients(case)
        replay.replay.set_target_indices(replay.experts.clone())
        replay.replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        replayed = gradients(case)
        replay.replay.set_target_indices(replay.experts.flip(0))
        other = gradients(case)
    assert own.keys() == replayed.keys()
    assert all(equal_bits(own[name], replayed[name]) and own[name].any() for name in own)
    assert not equal_bits(own["router.weight"], other["router.weight"])


def test_an_expert_without_a_token_has_a_gradient_of_zero() -> None:
    """An optimizer then decays and steps its weights like those of the others."""
    case = Case.random(64, 2, 8)
    with pinned(Contract(dtype="bf16")):
        found = gradients(replace(case, hidden=case.hidden[:1]))
    of_experts = [gradient for name, gradient in found.items() if name.endswith("linear_fc2.weight")]
    assert sum(bool(gradient.any()) for gradient in of_experts) == 2
