"""Experts for a host's `--spec` compute Megatron's formula, under the names that the hosts' converters want."""

from types import SimpleNamespace

import torch
from torch import Tensor

from lab.in_host.layers import SequentialExperts

HIDDEN, WIDTH, EXPERTS = 6, 4, 3
COUNTS = torch.tensor([2, 0, 3])


def made() -> SequentialExperts:
    generator = torch.Generator().manual_seed(0)
    config = SimpleNamespace(
        hidden_size=HIDDEN, moe_ffn_hidden_size=WIDTH, params_dtype=torch.float64, expert_model_parallel_size=1,
        tensor_model_parallel_size=1, init_method=lambda x: x.normal_(generator=generator),
        output_layer_init_method=lambda x: x.normal_(generator=generator),
    )  # fmt: skip
    return SequentialExperts(EXPERTS, config)


def by_hand(experts: SequentialExperts, tokens: Tensor, probs: Tensor) -> Tensor:
    weights = dict(experts.named_parameters())
    rows = []
    for row, (token, prob) in enumerate(zip(tokens, probs, strict=True)):
        number = 0 if row < 2 else 2
        gate, up = (weights[f"linear_fc1.weight{number}"] @ token).split(WIDTH)
        rows.append(weights[f"linear_fc2.weight{number}"] @ (gate * gate.sigmoid() * up * prob))
    return torch.stack(rows)


def test_each_token_takes_its_expert_with_its_weight() -> None:
    experts = made()
    tokens = torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    probs = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    found, bias = experts(tokens, COUNTS, probs)
    torch.testing.assert_close(found, by_hand(experts, tokens, probs), rtol=1e-12, atol=1e-12)
    assert bias is None


def test_an_expert_without_a_token_has_a_gradient_of_zero() -> None:
    experts = made()
    experts(torch.ones(5, HIDDEN, dtype=torch.float64), COUNTS, torch.ones(5, dtype=torch.float64))[0].sum().backward()
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert {name.rpartition("weight")[2] for name in grads} == {"0", "1", "2"} and len(grads) == 2 * EXPERTS
    for name, grad in grads.items():
        assert grad is not None and bool(grad.any()) == (not name.endswith("1"))
