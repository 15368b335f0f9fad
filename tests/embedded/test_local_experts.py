"""A mixture of experts in the embedded host: its engine against transformers' Qwen3-MoE, its trainer on any ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from test_local_engine import CONFIG as DENSE
from test_local_engine import NO_EOS, PROMPTS, hf_log_probs
from test_local_parallel import Grid, assert_same_run, drawn, settings, train
from test_local_true_on_policy import EXPERTS
from tolerances import FP32_LOG_PROB

from lab.host.model.decoding import Sampling
from lab.host.model.engine import DecodeEngine, Generation
from lab.host.model.quantize import at_precision
from true_on_policy.models.tiny import config_of

CONFIG = replace(DENSE, ffn=24, experts=8, top_k=2)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Random weights, large enough that distributions and gates are far from uniform."""
    generator = torch.Generator().manual_seed(0)
    shapes = CONFIG.shapes().items()
    return {name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1) for name, shape in shapes}


@pytest.fixture(scope="module")
def hf(weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("qwen3-moe")
    config_of(CONFIG.family, CONFIG, torch.float32).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generated(weights: dict[str, torch.Tensor], eos: int = NO_EOS) -> list[Generation]:
    engine = DecodeEngine(CONFIG, "fp32")
    engine.update_weights(weights, version=0)
    return engine.generate(PROMPTS, Sampling(9, 1.0, eos), (5, 6, 7, 8))


@pytest.mark.parametrize("eos", [NO_EOS, 3])
def test_the_engine_computes_and_routes_as_transformers_does(
    hf: torch.nn.Module, weights: dict[str, torch.Tensor], eos: int
) -> None:
    made = generated(weights, eos)
    assert (len({len(one.tokens) for one in made}) > 1) is (eos == 3)
    for prompt, one in zip(PROMPTS, made, strict=True):
        expected = hf_log_probs(hf, prompt, one.tokens)
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, rtol=0, atol=FP32_LOG_PROB)
        sequence = torch.tensor([[*prompt, *one.tokens]])
        with torch.no_grad():
            gates = hf(sequence, output_router_logits=True).router_logits
        routes = torch.stack([layer[:-1].topk(CONFIG.top_k).indices for layer in gates], 1)
        assert one.routes is not None and torch.equal(one.routes.long(), routes)


def test_integers_leave_the_gate_as_it_is(weights: dict[str, torch.Tensor]) -> None:
    rounded = {name for name, weight in weights.items() if not at_precision(name, weight, "int4").equal(weight)}
    assert {name for name in weights if "experts" in name} <= rounded
    assert not [name for name in rounded if name.endswith("mlp.gate.weight")]


def test_the_layout_of_ranks_changes_no_step(yaml: Path, tmp_path: Path) -> None:
    one, four = (settings(grid, yaml, EXPERTS) for grid in (Grid(), Grid(dp=2, cp=2)))
    rollout = drawn(one, "bf16")
    assert_same_run(train(four, rollout, tmp_path / "four"), train(one, rollout, tmp_path / "one"))
