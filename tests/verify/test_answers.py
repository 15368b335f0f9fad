"""Answers of SGLang and vLLM that lie about their length, their tokens, their numbers or their shape."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from true_on_policy.engines.protocol import EngineError, Request
from true_on_policy.engines.server import Server
from true_on_policy.engines.sglang.engine import SGLang
from true_on_policy.engines.vllm.engine import VLLM


class Answering(Server):
    """A server whose every answer is `answer`."""

    def __init__(self, answer: Any):
        self.answer = answer

    def post(self, path: str, body: Any, seconds: float = 0) -> Any:
        return self.answer


def sampled(**changed: Any) -> dict[str, Any]:
    """SGLang's answer to a request of two tokens after the prompt (5, 6, 7)."""
    meta = {
        "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
        "input_token_logprobs": [[None, 5, None], *([-1.0, token, None] for token in (6, 7, 8, 9))],
        "weight_version": "0",
        "cached_tokens": 0,
        "num_retractions": 0,
        "prompt_tokens": 3,
    }
    return {"output_ids": changed.pop("output_ids", [8, 9]), "meta_info": meta | changed}


TWO = Request((5, 6, 7), 2)
SGLANG_LIES: dict[str, Any] = {
    "null": None,
    "none": [],
    "two": [sampled(), sampled()],
    "a dict": {"error": "busy"},
    "no meta": [{}],
    "meta of null": [{"meta_info": None}],
    "one token": [sampled(output_ids=[8])],
    "other tokens": [sampled(output_ids=[8, 8])],
    "tokens in words": [sampled(output_ids=["8", "9"])],
    "a token beyond the vocabulary": [sampled(output_ids=[8, 99], output_token_logprobs=[[-1, 8], [-1, 99]])],
    "rows of null": [sampled(output_token_logprobs=[None, None])],
    "NaN": [sampled(output_token_logprobs=[[-0.5, 8], [float("nan"), 9]])],
    "infinity": [sampled(output_token_logprobs=[[-0.5, 8], [-float("inf"), 9]])],
    "above 0": [sampled(output_token_logprobs=[[-0.5, 8], [2.0, 9]])],
    "true": [sampled(output_token_logprobs=[[-0.5, 8], [True, 9]])],
    "a version of words": [sampled(weight_version="default")],
    "a version of null": [sampled(weight_version=None)],
    "cached tokens below 0": [sampled(cached_tokens=-1)],
    "another prompt": [sampled(prompt_tokens=4)],
}


def served_sglang(answer: Any) -> SGLang:
    engine = object.__new__(SGLang)
    engine._server, engine._last_id, engine._seeded = Answering(answer), 50, False
    return engine


@pytest.mark.parametrize("lie", SGLANG_LIES)
def test_an_answer_of_sglang_of_another_shape_is_an_error(lie: str):
    with pytest.raises(EngineError, match="/generate: "):
        served_sglang(SGLANG_LIES[lie]).generate([TWO])


@pytest.mark.parametrize("rows", [None, [], [[None, 5]], [[-1.0, 6]] * 5, [[None, 5], *[["x", 8]] * 4], 3])
def test_scores_of_sglang_of_another_shape_are_an_error(rows: Any):
    engine = served_sglang([sampled()])
    [sample] = engine.generate([TWO])
    assert engine.score([sample])[0].tolist() == [-1.0, -1.0]
    with pytest.raises(EngineError, match="/generate: "):
        served_sglang([sampled(input_token_logprobs=rows)]).score([sample])


@pytest.mark.parametrize("answer", [None, [], {}, {"success": "yes", "message": ""}, {"success": False}])
def test_an_update_that_was_not_confirmed_is_an_error(answer: Any, tmp_path: Path):
    with pytest.raises(EngineError, match="/update_weights_from_disk: "):
        served_sglang(answer).update_weights(tmp_path, 1)


def completed(**changed: Any) -> dict[str, Any]:
    rows = [{"token_id": 8, "logprob": -0.5}, {"token_id": 9, "logprob": -0.25}]
    choice = {"token_ids": [8, 9], "logprobs": {"content": rows}}
    told = {
        "usage": {"prompt_tokens": 3},
        "prompt_logprobs": [None, *({str(t): {"logprob": -1.0}} for t in (6, 7, 8, 9))],
    }
    return {"choices": [choice | changed.pop("choice", {})], **told, **changed}


VLLM_LIES: dict[str, Any] = {
    "null": None,
    "a list": [],
    "no choice": completed(choices=[]),
    "choices of null": completed(choices=[None]),
    "no log-probs": completed(choice={"logprobs": None}),
    "one token": completed(choice={"token_ids": [8]}),
    "tokens in words": completed(choice={"token_ids": ["8", "9"]}),
    "rows of words": completed(choice={"logprobs": {"content": "ab"}}),
    "NaN": completed(choice={"logprobs": {"content": [{"token_id": t, "logprob": float("nan")} for t in (8, 9)]}}),
    "true": completed(choice={"logprobs": {"content": [{"token_id": t, "logprob": True} for t in (8, 9)]}}),
    "no usage": completed(usage=None),
    "cached tokens in words": completed(usage={"prompt_tokens_details": {"cached_tokens": "many"}}),
    "another prompt": completed(usage={"prompt_tokens": 4}),
}


def served_vllm(answer: Any) -> VLLM:
    engine = object.__new__(VLLM)
    engine._server, engine._version, engine._senders = Answering(answer), 0, ThreadPoolExecutor(1)
    return engine


@pytest.mark.parametrize("lie", VLLM_LIES)
def test_an_answer_of_vllm_of_another_shape_is_an_error(lie: str):
    with pytest.raises(EngineError, match="/inference/v1/generate: "):
        served_vllm(VLLM_LIES[lie]).generate([TWO])


@pytest.mark.parametrize("rows", [None, [], [None], [None, {}, {}, {}, {}], [None, *["8"] * 4], 3])
def test_scores_of_vllm_of_another_shape_are_an_error(rows: Any):
    [sample] = served_vllm(completed()).generate([TWO])
    assert served_vllm(completed()).score([sample])[0].tolist() == [-1.0, -1.0]
    with pytest.raises(EngineError, match="/inference/v1/generate: "):
        served_vllm(completed(prompt_logprobs=rows)).score([sample])
