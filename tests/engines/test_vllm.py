"""The real vLLM, stock and with its compiled kernels replaced by our plugin."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.engines.asking import answer_of
from true_on_policy.engines.protocol import EngineError, Request, Sample
from true_on_policy.engines.server import GENERATE_SECONDS
from true_on_policy.engines.vllm.engine import VLLM, Pool
from true_on_policy.errors import NotSeenError
from true_on_policy.kernels.pin import pinned
from true_on_policy.models.tiny import read_weights, updated
from true_on_policy.trainers.hf import HuggingFace
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.weights.comparison import compare
from true_on_policy.weights.held import EMBEDDING

pytestmark = pytest.mark.timeout(1200)  # a server may take 600 s to start

PROMPT = tuple(range(2, 150))  # longer than a chunk of the prefill
REQUESTS = [Request((5, 6, 7), 40), Request(PROMPT, 30), Request((9,), 35, temperature=0.7)]
AGAIN = [Request(PROMPT + (3, 1), 20)]  # its beginning is in the cache then


def joined(samples: list[Sample]) -> torch.Tensor:
    return torch.cat([sample.log_probs for sample in samples])


@pytest.mark.parametrize("order", ["vllm", "hf"])
def test_every_log_prob_is_the_trainers_through_an_update(order: str, tiny: Path, tmp_path: Path):
    """In float32, where no order of rounding tells, `test_training.py` compares vLLM."""
    contract, agreed = Contract(dtype="bf16"), ORDERS[order]
    trainers = [HuggingFace(tiny, "bf16", agreed), Megatron(tiny, "bf16", agreed)]
    with closing(VLLM(tiny, "bf16", contract, agreed, Pool(prefill_chunk=64))) as engine:
        for version, path in enumerate((tiny, updated(tiny, tmp_path / "1", seed=1))):
            if version:
                assert compare(engine.weights_checker, read_weights(path)).differences[0].name == EMBEDDING
                engine.update_weights(path, version)
            assert compare(engine.weights_checker, read_weights(path)).equal
            samples = engine.generate(REQUESTS) + engine.generate(AGAIN)
            scored = torch.cat(engine.score(samples))
            assert samples[-1].cached >= 128 and {sample.version for sample in samples} == {version}
            for trainer in trainers:
                trainer.load(path)
                with pinned(contract):
                    tempered = [sample.request.temperature for sample in samples]
                    assert equal_bits(joined(samples), torch.cat(trainer.log_probs(samples, tempered)))
                    assert equal_bits(scored, torch.cat(trainer.log_probs(samples, [1.0] * len(samples))))


@pytest.fixture(scope="module")
def stock(tiny_fp32: Path) -> Iterator[VLLM]:
    with closing(VLLM(tiny_fp32, "fp32")) as engine:
        yield engine


def test_the_stock_engine_is_not_the_trainer_and_ends_where_asked(stock: VLLM, tiny_fp32: Path):
    # A temperature so low decides the tokens: vLLM's requests carry no seed.
    certain = Request((5, 6, 7), 40, temperature=1e-3)
    [whole] = stock.generate([certain])
    [cut] = stock.generate([replace(certain, end=whole.tokens[3])])
    assert cut.tokens == whole.tokens[: whole.tokens.index(whole.tokens[3]) + 1]
    samples = stock.generate(REQUESTS)
    trainer = torch.cat(HuggingFace(tiny_fp32, "fp32").log_probs(samples, [1.0, 1.0, 0.7]))
    assert (joined(samples) != trainer).float().mean() > 0.5


def test_an_update_drops_the_cache_once_the_last_request_has_ended(stock: VLLM, tiny_fp32: Path):
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(stock.generate, requests := [Request(PROMPT, 400)] * 8)
        while running_requests(stock) == 0:
            if running.done():  # before its gauge was read: a busy machine
                running = beside.submit(stock.generate, requests)
        stock.update_weights(tiny_fp32, 1)
        running.result()
    [sample] = stock.generate([Request(PROMPT, 1)])
    assert (sample.version, sample.cached) == (1, 0)


def running_requests(engine: VLLM) -> float:
    """What the server says of itself to Prometheus."""
    lines = engine._server.get("/metrics", GENERATE_SECONDS).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_a_cache_that_stays_in_use_is_an_error(stock: VLLM, tiny_fp32: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("true_on_policy.engines.server.GENERATE_SECONDS", 0)
    monkeypatch.setattr(stock, "_server", Mock(post=lambda *_: {"success": False}))
    with pytest.raises(EngineError, match="cache of the previous weights is still in use after 0 s"):
        stock.update_weights(tiny_fp32, 2)


def test_a_stranger_without_the_key_is_refused_also_where_weights_change(stock: VLLM):
    for path in ("/inference/v1/generate", "/collective_rpc", "/reset_prefix_cache"):
        with pytest.raises(EngineError, match=f"{path} answered 401"):
            answer_of(stock._server.url, path, {}, 60)
    listed = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True)
    assert "vllm.entrypoints" in listed.stdout and stock._server.key not in listed.stdout


def test_packed_weights_are_not_compared(stock: VLLM, tiny_fp32: Path):
    with pytest.raises(NotSeenError, match=r"packed form.*, the first .*qkv_proj\.weight \(packed_float32\)"):
        compare(stock.weights_checker, read_weights(tiny_fp32))


def test_a_missing_checkpoint_is_an_error(stock: VLLM, tmp_path: Path):
    with pytest.raises(EngineError, match="vllm: "):
        stock.update_weights(tmp_path / "nowhere", 3)
