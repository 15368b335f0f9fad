"""Layers for a host's `--spec` have the bits of the proof's trainer, and are refused where nothing is pinned."""

from argparse import Namespace
from pathlib import Path

import pytest
from context_ranks import DTYPES, SEQUENCES, tiny
from megatron.core.models.gpt import GPTModel

from lab.in_host import layers as host_layers
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
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
