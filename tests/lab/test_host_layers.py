"""Layers for a host's `--spec` have the bits of the proof's trainer, and experts Megatron's formula."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from trainer_ranks import SEQUENCES, tiny

from lab.in_host import layers as host_layers
from lab.in_host.layers import SequentialExperts
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.engines.handover import handed_over
from true_on_policy.errors import ContractError
from true_on_policy.kernels.pin import pinned
from true_on_policy.models.tiny import read_config
from true_on_policy.trainers.megatron import Megatron

ARGS = Namespace(num_experts=None)
FUSED = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
         "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}  # fmt: skip


def with_layers(trainer: Megatron, folder: Path, spec: object) -> GPTModel:
    """The trainer's model on other layers, with the weights under Transformer Engine's names."""
    stated, config = read_config(folder), trainer.model.config
    model = GPTModel(config, spec, trainer.model.vocab_size, stated.max_position_embeddings,  # pyright: ignore[reportArgumentType]
                     parallel_output=False, position_embedding_type="rope",
                     rotary_base=int(stated.rope_parameters["rope_theta"]),
                     share_embeddings_and_output_weights=stated.tie_word_embeddings)  # fmt: skip
    weights = {}
    for name, value in trainer.model.named_parameters():
        for own, fused in FUSED.items():
            name = name.replace(own, fused)
        weights[name] = value
    assert {name for name, _ in model.named_parameters()} == set(weights)
    model.load_state_dict(weights, strict=False)
    return model.to(next(iter(weights.values())).dtype).eval()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_the_layers_have_the_bits_of_the_proof(
    tmp_path: Path, dtype: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = Contract(dtype=dtype, norm_order=side)
    for name, value in handed_over(contract, None).items():
        monkeypatch.setenv(name, value)
    folder = tiny(tmp_path, dtype)
    trainer = Megatron(folder, dtype, ORDERS["sglang" if side == "engine" else "megatron"])
    with pinned(contract):
        expected = trainer.logits(SEQUENCES)
        agreed = with_layers(trainer, folder, host_layers.layers(ARGS, trainer.model.config))
        stock = with_layers(trainer, folder, host_layers.stock_layers(ARGS, trainer.model.config))
        trainer.model = agreed
        assert all(equal_bits(a, b) for a, b in zip(expected, trainer.logits(SEQUENCES), strict=True))
        trainer.model = stock
        found = trainer.logits(SEQUENCES)
        rounds_otherwise = (dtype, side) == ("bf16", "engine")
        assert rounds_otherwise != all(equal_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_without_a_pin_the_layers_are_refused() -> None:
    with pytest.raises(ContractError, match="nothing is pinned here; set --custom-megatron-init-path lab.in_host"):
        host_layers.layers(ARGS, None)


# Experts, under the names that the hosts' converters want

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
