"""Which version wrote a token, by the real SGLang: in one request that an update meets, and in a run with --async."""

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from test_local_async import versions_of_a_run

from lab.host.rollout.serving import SERVING
from mis_plugins.hosts.versions import kept
from mis_plugins.versions.spans import spans
from true_on_policy.engines.protocol import Request, Sample
from true_on_policy.engines.server import GENERATE_SECONDS, Private, Server, started
from true_on_policy.engines.sglang.engine import SGLang
from true_on_policy.models.tiny import updated

pytestmark = pytest.mark.timeout(1200)  # a server may take 600 s to start

PROMPT, LENGTH = (5, 6, 7), 300
CLOSE = 1e-3
"""Decode and prefill in float32 are far nearer, and another version's log-probs further off."""


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[SGLang]:
    """A server whose steps do not overlap: else the step that an update meets is counted after it."""

    def alone(name: str, command: list[str], environment: dict[str, str], private: Private) -> Server:
        return started(name, [*command, "--disable-overlap-schedule"], environment, private=private)

    with patch("true_on_policy.engines.server.started", alone):
        engine = cast(SGLang, SERVING["sglang"].start(tiny, "fp32", None, 8))
    with closing(engine):
        yield engine


def streamed(engine: SGLang, cut: Mapping[str, float] = {}, **more: Any) -> Iterator[dict[str, Any]]:
    """What is told of one request after each of its tokens."""
    body = {
        "input_ids": list(PROMPT),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True, **cut},
        "return_logprob": True,
        "stream": True,
        **more,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {engine._server.key}"}
    asked = urllib.request.Request(engine._server.url + "/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=GENERATE_SECONDS) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


@contextmanager
def paused(engine: SGLang) -> Iterator[None]:
    """A server whose requests stay where they are; else an update waits until they have ended."""
    engine._server.post("/pause_generation", {"mode": "in_place"}, GENERATE_SECONDS)
    yield
    engine._server.post("/continue_generation", {}, GENERATE_SECONDS)


def updated_in_place(engine: SGLang, checkpoint: Path) -> dict[str, Any]:
    """Answer of one request in whose midst the weights of version 2 took the place of those of version 1."""
    told = []
    for answer in streamed(engine):
        told.append(answer)
        if len(told) == 20:
            with paused(engine):
                engine.update_weights(checkpoint, 2, keep_cache=True)
    return told[-1]


def test_the_spans_of_a_request_name_the_token_where_its_weights_moved(
    engine: SGLang, tiny: Path, tmp_path: Path
) -> None:
    engine.update_weights(tiny, 1)
    answer = updated_in_place(engine, updated(tiny, tmp_path / "2", seed=1))
    (first, _, moved), (second, _, end) = spans(answer["meta_info"], LENGTH)
    assert (first, second, end) == (1, 2, LENGTH) and 0 < moved < LENGTH
    rows = answer["meta_info"]["output_token_logprobs"]
    told = torch.tensor([row[0] for row in rows], dtype=torch.float32)
    sample = Sample(Request(PROMPT, LENGTH), tuple(row[1] for row in rows), told, 1)
    engine.update_weights(tiny, 3)  # the weights of version 1 again
    off = (engine.score([sample])[0] - told).abs()
    assert off[:moved].max() < CLOSE < off[moved]


@pytest.mark.parametrize("head", [0, 8])
def test_log_probs_over_kept_sets_are_the_engines_renormalized(engine: SGLang, head: int) -> None:
    cut = {"top_p": 0.03, "top_k": 8, "max_new_tokens": 40}  # the tiny model is flat
    *_, answer = streamed(engine, cut, top_logprobs_num=8, **kept.request(head))
    meta = answer["meta_info"]
    told, sets = kept.over_sets(meta, head)
    assert len(sets) == 40 and 1 <= sets.sizes.min() <= sets.sizes.max() <= 8
    ids = torch.tensor(sets.ids).split(sets.sizes.tolist())
    for position, (row, of_set) in enumerate(zip(told["output_token_logprobs"], ids, strict=True)):
        top = {token: log_prob for log_prob, token, *_ in meta["output_top_logprobs"][position]}
        of_engine = torch.tensor([top[token] for token in of_set.tolist()])
        mass = of_engine.double().logsumexp(0)
        whole, token = meta["output_token_logprobs"][position][:2]
        assert row[0] == pytest.approx(float(whole - mass), abs=1e-5) and row[1] == token
        if head:
            named = told["output_top_logprobs"][position]
            assert [log_prob for log_prob, _ in named] == pytest.approx(
                sorted((of_engine - mass).tolist(), reverse=True), abs=1e-5
            )
    assert meta["num_retractions"] == 0, "what samples.py reads"


def test_an_update_drops_the_cache_once_the_last_request_has_ended(engine: SGLang, tiny: Path, tmp_path: Path) -> None:
    checkpoint = updated(tiny, tmp_path / "4", seed=1)
    with ThreadPoolExecutor(1) as beside:
        for number, _ in enumerate(streamed(engine)):
            if number == 20:
                with paused(engine):
                    update = beside.submit(engine.update_weights, checkpoint, 4)
                    while not update.done() and "new_version='4'" not in engine._server.output():
                        time.sleep(0.01)
        update.result()
    [sample] = engine.generate([Request(PROMPT, 1)])
    assert (sample.version, sample.cached) == (4, 0)


def test_no_version_tells_of_a_prompt_that_was_cached_before_an_update(
    engine: SGLang, tiny: Path, tmp_path: Path
) -> None:
    prompt = Request(tuple(range(2, 60)), 20)
    engine.update_weights(tiny, 5)
    engine.generate([prompt])
    newer = updated(tiny, tmp_path / "6", seed=1)
    engine.update_weights(newer, 6, keep_cache=True)  # as the pause `in_place` of Miles has it
    [sample] = engine.generate([prompt])
    engine.update_weights(newer, 7)
    off = (engine.score([sample])[0] - sample.log_probs).abs()
    assert sample.version == 6 and sample.cached >= 57 and off.max() > CLOSE, off


@pytest.mark.parametrize("engine", ["sglang", "vllm --kv-channels 32"])
def test_an_asynchronous_run_on_its_server(engine: str, tmp_path: Path) -> None:
    """SGLang names the version of each token; vLLM names none, and samples between two updates alone."""
    versions_of_a_run(f"--rollout-engine {engine} --rollout-weights fp32", tmp_path)
