"""The real SGLang serves a tiny Qwen3-VL with its vision tower: on text alone it has the bits of the trainers."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract import rounding as rope
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.engines.protocol import Request
from true_on_policy.engines.sglang.engine import PROOF, SGLang
from true_on_policy.kernels.pin import pinned
from true_on_policy.models.tiny import checkpoint, read_config, read_weights, updated
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.weights.comparison import compare

PLACEHOLDER = 316  # of an image: without one it is a token like any other
REQUESTS = [
    Request((5, 6, 7), 40, seed=1),
    Request((9, PLACEHOLDER, 4), 35, seed=2, temperature=0.7),
    Request(tuple(range(2, 150)), 30, seed=3),  # longer than a chunk of the prefill
]

pytestmark = pytest.mark.timeout(1200)  # a server may take 600 s to start


def test_on_text_alone_it_has_the_trainers_bits(tmp_path: Path):
    first = checkpoint("tiny-qwen3-vl", tmp_path / "0", torch.bfloat16, seed=0)
    contract = Contract(dtype="bf16", shapes=Shapes.of(read_config(first)))
    trainers = [kind(first, "bf16", ORDERS["sglang"]) for kind in (Megatron, HuggingFace)]
    with closing(SGLang(first, "bf16", contract, pool=PROOF)) as engine:
        for version, weights in enumerate((first, updated(first, tmp_path / "1", seed=1))):
            if version:
                engine.update_weights(weights, version)
            samples = engine.generate(REQUESTS)
            sampled = torch.cat([sample.log_probs for sample in samples])
            for trainer in trainers:
                trainer.load(weights)
                with pinned(contract):
                    ours = trainer.log_probs(samples, [request.temperature for request in REQUESTS])
                assert equal_bits(torch.cat(ours), sampled), (trainer.name, version)
        assert compare(engine.weights_checker, read_weights(weights)).equal  # the vision tower's among them


def test_its_mrope_with_equal_positions_is_plain_rope_whatever_the_section(
    ran_in_sglang: Callable[..., str], tmp_path: Path
):
    sections, base, width = [[6, 5, 5], [5, 6, 5], [16, 0, 0], [0, 0, 16], [1, 14, 1], [4, 4, 8]], 5e6, 32
    positions = torch.tensor([0, 1, 2, 3, 100, 511, 512, 2047])
    heads = torch.randn(len(positions), 4, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    given, made = tmp_path / "case.safetensors", tmp_path / "outputs.safetensors"
    asked = json.dumps({"sections": sections, "base": base})
    save_file({"heads": heads, "positions": positions}, given, {"asked": asked})
    ran_in_sglang("sglang_mrope.py", given, made)
    angles = positions[:, None] * (1.0 / base ** (torch.arange(0, width, 2).float() / width))
    turned = rope.rotated(heads, torch.cat((angles, angles), -1)[:, None])
    plain = torch.cat((turned, turned[:, :1]), 1).flatten(1)
    theirs = load_file(made)
    assert len(theirs) == 4 * len(sections)
    for name, rotated in theirs.items():
        assert equal_bits(rotated, plain) == (name.startswith("alike") or "[16, 0, 0]" in name), name
