"""Engines of `true_on_policy`, stepped: a token a call, their weights moving in between."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from teacher_forcing import teacher_forced
from test_local_async import versions_of_a_run
from tolerances import FP32_LOG_PROB

from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Sampling, Unfinished
from lab.host.model.engine import DecodeEngine
from lab.host.rollout.served_steps import ServedSteps
from lab.host.rollout.serving import SERVING
from true_on_policy.engines.hf.engine import HuggingFace
from true_on_policy.engines.protocol import EngineError, Request, Sample

CONFIG = ModelConfig(hidden=32, ffn=48, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=16)
PROMPTS = ((1, 2, 3), (4,), (5, 6, 7, 8, 9))


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in CONFIG.shapes().items()}


class Server(HuggingFace):
    """Hugging Face's engine in the place of a server: it says its version, and whether an update kept its cache."""

    kept: list[bool] = []

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None:
        super().update_weights(checkpoint, version)
        self.kept.append(keep_cache)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        assert all(request.length == 1 for request in requests)
        return super().generate(requests)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], ServedSteps]:
    spec = replace(SERVING["sglang"], start=lambda path, dtype, contract, running: Server(path, dtype))
    monkeypatch.setitem(SERVING, "sglang", spec)
    monkeypatch.setattr(Server, "kept", [])
    return lambda keep: ServedSteps("sglang", CONFIG, "fp32", keep)


@pytest.mark.parametrize("keep", [True, False])
def test_a_server_is_stepped_by_calls_of_one_token(keep: bool, served: Callable[[bool], ServedSteps]) -> None:
    engine = served(keep)
    engine.update_weights(weights(0), 0)
    begun = [Unfinished(number, prompt, (), 100 + number) for number, prompt in enumerate(PROMPTS)]
    with closing(engine):
        decoding = engine.begin([*begun, Unfinished(3, (1,), (2,) * 8, 0)], Sampling(8, 1.0, eos=15))
        assert not decoding.ended
        drawn = [decoding.step() for _ in range(4)]
        engine.update_weights(weights(1), 1)
        decoding = decoding.go_on(engine.decoder, keep_cache=keep)
        assert decoding.stale_cache == keep and Server.kept == [keep, keep]
        drawn += [decoding.step() for _ in range(4)]
    assert decoding.ended and decoding.unfinished == []
    tokens = {number: [d.tokens[d.numbers.index(number)] for d in drawn if number in d.numbers] for number in range(3)}
    assert all(15 not in row[:-1] and (len(row) == 8 or row[-1] == 15) for row in tokens.values())
    assert sum(sum(d.ended) for d in drawn) == 3 and all(d.numbers.count(3) == 0 for d in drawn)


def test_the_log_probs_of_a_server_are_those_of_its_weights(served: Callable[[bool], ServedSteps]) -> None:
    engine = served(False)
    engine.update_weights(weights(0), 0)
    decoding = engine.begin([Unfinished(0, PROMPTS[0], (), 7)], Sampling(3, 1.0, eos=99))
    found: list[float] = []
    tokens: list[int] = []
    for seed in (0, 1, 2):
        engine.update_weights(weights(seed), seed)
        step = decoding.go_on(engine.decoder, keep_cache=False).step()
        tokens, found = tokens + step.tokens, found + step.log_probs
    for place, (seed, log_prob) in enumerate(zip((0, 1, 2), found, strict=True)):
        own = DecodeEngine(CONFIG, "fp32")
        own.update_weights(weights(seed), seed)
        (wanted,) = teacher_forced(own, [(*PROMPTS[0], *tokens[: place + 1])], [1])
        assert log_prob == pytest.approx(float(wanted[0]), abs=FP32_LOG_PROB)


def test_a_server_of_another_version_is_an_error(served: Callable[[bool], ServedSteps]) -> None:
    engine = served(False)
    engine.update_weights(weights(0), 0)
    decoding = engine.begin([Unfinished(0, (1, 2), (), 0)], Sampling(4, 1.0, eos=15))
    engine.version = 5
    with pytest.raises(EngineError, match=r"tokens of version \{0\}, with weights of 5"):
        decoding.step()


def test_no_token_is_drawn_over_old_keys_where_the_engine_keeps_none(tmp_path: Path) -> None:
    engine = ServedSteps("hf", CONFIG, "fp32", keep_cache=True)
    engine.update_weights(weights(0), 0)
    with closing(engine):
        decoding = engine.begin([Unfinished(0, PROMPTS[0], (), 7)], Sampling(3, 1.0, eos=99))
        assert not decoding.go_on(engine.decoder, keep_cache=True).stale_cache


def test_an_asynchronous_run(tmp_path: Path) -> None:
    versions_of_a_run("--rollout-engine hf", tmp_path)
