"""A slice of the certificate of a real model: 200 tokens of real text, SGLang against Megatron-core.

`bash scripts/verify-real-model.sh` runs the whole of it.
"""

from contextlib import closing

import pytest
import torch

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.contract.sides import ENGINES
from true_on_policy.engines.protocol import Request
from true_on_policy.kernels.pin import pinned
from true_on_policy.models.pretrained import pretrained
from true_on_policy.models.tiny import read_config
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.verify.prompts import read_prompts

pytestmark = pytest.mark.timeout(1800)  # a server may take 600 s to start, and the model is fetched once
TOKENS, BATCH = 200, 8


def test_a_real_model_on_real_prompts_is_truly_on_policy_and_stock_it_is_not():
    folder = pretrained("smollm2-135m", print)
    prompts = read_prompts("builtin", folder).tokens[:BATCH]
    contract = Contract(dtype="bf16", shapes=Shapes.of(read_config(folder)))
    requests = [Request(prompt, TOKENS // BATCH, seed) for seed, prompt in enumerate(prompts)]
    with closing(ENGINES["sglang"].start(folder, contract, ORDERS["sglang"])) as engine:
        samples = engine.generate(requests)
        scored = torch.cat(engine.score(samples))
    decoded = torch.cat([sample.log_probs for sample in samples])
    assert len(decoded) == TOKENS and equal_bits(decoded, scored)
    trainer, stock = Megatron(folder, "bf16", ORDERS["sglang"]), Megatron(folder, "bf16")
    with pinned(contract):
        assert equal_bits(decoded, torch.cat(trainer.log_probs(samples, [1.0] * BATCH)))
    assert (decoded != torch.cat(stock.log_probs(samples, [1.0] * BATCH))).float().mean() > 0.5
