"""The real SGLang serves a tiny Qwen3-VL with its vision tower: on text alone it has the bits of the trainers."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from true_on_policy.bitwise import equal_bits
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
