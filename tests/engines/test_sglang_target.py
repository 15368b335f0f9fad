"""SGLang's own `--rl-on-policy-target fsdp`: what it makes equal, and what not.

The trainer it is made for holds float32 weights and runs in bf16 autocast. Its decode then reports the log_softmax of
bf16 logits in bf16, its prefill the same in float32: each is compared with the trainer's own of that kind.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from test_sglang import REQUESTS, joined

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.engines.protocol import Request, Sample
from true_on_policy.engines.sglang.engine import SGLang
from true_on_policy.kernels.pin import pinned
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.protocol import sampled_log_probs

pytestmark = pytest.mark.timeout(1200)  # a server may take 600 s to start

CONTRACT = Contract(dtype="bf16")


@pytest.fixture(scope="module")
def engine(tiny_fp32: Path) -> Iterator[SGLang]:
    with closing(SGLang(tiny_fp32, "bf16", CONTRACT, target="fsdp")) as engine:
        yield engine


def logits(tiny_fp32: Path, samples: list[Sample]) -> list[torch.Tensor]:
    """bf16, of the autocast trainer."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return HuggingFace(tiny_fp32, "fp32").logits([sample.sequence for sample in samples])


def in_bf16(rows: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Temperature, log_softmax and all, as SGLang's sampler does it in this mode."""
    tempered = rows.div(torch.tensor(sample.request.temperature)).bfloat16()
    first = len(sample.request.prompt) - 1
    scored = torch.log_softmax(tempered, -1)[first : first + len(sample.tokens)]
    return scored.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0].float()


def test_decode_is_the_autocast_trainers_in_bf16_and_prefill_is_in_float32(engine: SGLang, tiny_fp32: Path):
    samples = engine.generate([*REQUESTS, Request((8, 9), 30, seed=7, temperature=0.7)])
    scored = torch.cat(engine.score(samples))
    with pinned(CONTRACT):
        rows = logits(tiny_fp32, samples)
    expected = [in_bf16(part, sample) for part, sample in zip(rows, samples, strict=True)]
    assert equal_bits(joined(samples), torch.cat(expected))
    whole = [sampled_log_probs(part, sample, 1.0) for part, sample in zip(rows, samples, strict=True)]
    assert equal_bits(scored, torch.cat(whole))


def test_its_decode_is_not_its_prefill_and_stock_kernels_are_not_its_own(engine: SGLang, tiny_fp32: Path):
    samples = engine.generate(REQUESTS)
    scored = torch.cat(engine.score(samples))
    assert (joined(samples) != scored).float().mean() > 0.9, "bf16 values beside float32 ones"
    rows = logits(tiny_fp32, samples)
    stock = [sampled_log_probs(part, sample, 1.0) for part, sample in zip(rows, samples, strict=True)]
    assert (scored != torch.cat(stock)).float().mean() > 0.9
