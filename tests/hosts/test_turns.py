"""Turns of a sample against the engine's answers: the trainer learns what was sampled, behind the prompt it had."""

import asyncio
import logging
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import stand_ins

import lab.host  # noqa: F401  (a host that registers itself, and has no request to the engine)
from mis_plugins import mis
from mis_plugins.errors import InputError
from mis_plugins.hosts.turns import JUDGED, NOT_HEARD, Answer, fault_of, judge

PROMPT, FIRST, TOOL, SECOND = [1, 2, 3], [4, 5], [9, 9], [6, 7, 8]
TOKENS = [*PROMPT, *FIRST, *TOOL, *SECOND]
TURNS = [(3, 5), (7, 10)]


def given(prompt: Sequence[int], tokens: Sequence[int], as_text: bool = False) -> Answer:
    return Answer(len(prompt), None if as_text else prompt, tokens)


A, B = given(PROMPT, FIRST), given([*PROMPT, *FIRST, *TOOL], SECOND)
TEXT = given([*PROMPT, *FIRST, *TOOL], SECOND, as_text=True)
RETOKENIZED = given([*PROMPT, 45, *TOOL], SECOND)  # two tokens of the first turn became one

JUDGEMENTS: dict[str, tuple[Sequence[Answer], Sequence[int], Sequence[tuple[int, int]], str | None]] = {
    "as sampled": ([A, B], TOKENS, TURNS, None),
    "in any order, beside a retry": ([B, given(PROMPT, [5]), A], TOKENS, TURNS, None),
    "a text of as many tokens": ([A, TEXT], TOKENS, TURNS, None),
    "one turn of two calls": ([A, given([*PROMPT, *FIRST], [9, 9])], TOKENS[:7], [(3, 7)], None),
    "an end that was cut": ([A, B], TOKENS[:9], [(3, 5), (7, 9)], None),
    "nothing in the loss": ([], TOKENS, [], None),
    "another token": ([A, given(B.prompt or (), [6, 0, 8])], TOKENS, TURNS, "turn 2: the engine sampled other .* at 8"),
    "a prompt tokenized again": ([A, RETOKENIZED], TOKENS, TURNS, "turn 2: the engine was given other .* at 3"),
    "a text of fewer tokens": ([A, given([0] * 6, SECOND, as_text=True)], TOKENS, TURNS,
                               "turn 2: begins behind 7 tokens, and the engine answered behind 6"),
    "a tool's tokens in the loss": ([A, B], TOKENS, [(3, 10)], "turn 1: begins behind 5 tokens, and the engine .* 7"),
    "nothing heard": ([], TOKENS, TURNS, NOT_HEARD),
}  # fmt: skip


@pytest.mark.parametrize("case", JUDGEMENTS)
def test_the_first_turn_that_no_answer_has_is_named(case: str) -> None:
    answers, tokens, turns, said = JUDGEMENTS[case]
    found = fault_of(tokens, turns, answers)
    if said is None:
        assert found is None
    else:
        assert found is not None and re.search(said, found), found


def test_a_response_length_of_an_array_has_every_token_judged() -> None:
    sample = Namespace(tokens=[*PROMPT, 4, 0], response_length=numpy.array(2), loss_mask=None, index=0, group_index=0)
    judge(sample, [A])
    assert (
        getattr(sample, JUDGED).fault == "turn 1: the engine sampled other tokens than the trainer has, the first at 4"
    )


# --------------------------------------------------------------------------------------- a generate function at work


def host(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host's module of requests, whose `post` asks `_post`; the engine counts on from its prompt's last token."""

    async def _post(client: Any, url: str, payload: Any, max_retries: int = 60, headers: Any = None) -> Any:
        if not url.endswith("/generate"):
            return {"documents": []}
        prompt = payload["input_ids"]
        rows = [[-1.0, prompt[-1] + 1 + i, None] for i in range(2)]
        return {"meta_info": {"output_token_logprobs": rows, "prompt_tokens": len(prompt)}}

    modules = {name: {}, f"{name}.utils": {}, f"{name}.utils.http_utils": {"_post": _post}}
    stand_ins.load(modules, monkeypatch)
    return sys.modules[f"{name}.utils.http_utils"]


def dialogue(module: Any, drifts: bool) -> Any:
    """A generate function of two turns; one that drifts writes another token where the second turn begins."""

    async def generate(args: Any, sample: Any, sampling_params: Any) -> Any:
        for turn in range(2):
            output = await module._post(None, "http://r/generate", {"input_ids": list(sample.tokens)})
            ids = [row[1] for row in output["meta_info"]["output_token_logprobs"]]
            ids[0] += drifts and turn == 1
            await module._post(None, "http://tool/search", {"query": "a"})
            sample.tokens = [*sample.tokens, *ids, 50]  # a tool's token ends each turn
            sample.loss_mask = [*(sample.loss_mask or []), 1, 1, 0]
        sample.response_length = len(sample.loss_mask)
        sample.rollout_log_probs = [-1.0] * sample.response_length
        return sample

    return mis.turns_checked(generate)


def sample(index: int) -> Any:
    return Namespace(index=index, group_index=1, tokens=[1, 2], loss_mask=None, response_length=0, metadata={},
                     remove_sample=False, rollout_log_probs=None, status="completed")  # fmt: skip


@pytest.mark.parametrize("name", ["miles", "slime"])
def test_a_sample_with_a_changed_turn_leaves_the_loss(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, args = host(name, monkeypatch), Namespace()

    async def both() -> list[Any]:  # at once, as a host's tasks
        calls = [dialogue(module, drifts)(args, sample(i), {}) for i, drifts in enumerate((False, True))]
        return await asyncio.gather(*map(asyncio.create_task, calls))

    with caplog.at_level(logging.WARNING, "mis_plugins"):
        samples = asyncio.run(both())
        mis.drop_broken_samples(args, [samples])
    assert [one.remove_sample for one in samples] == [False, True]
    said = "sample 1 of group 1: turn 2: the engine sampled other tokens than the trainer has, the first at 5"
    assert said in caplog.text and f"dropped {said}" in caplog.text
    assert "rollout log-probs of other tokens in 1" in caplog.text


def test_a_call_that_continues_a_sample_judges_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    module, one = host("slime", monkeypatch), sample(0)
    for drifts, fault in ((False, False), (True, True), (False, True)):
        asyncio.run(dialogue(module, drifts)(Namespace(), one, {}))
        assert bool(getattr(one, JUDGED).fault) == fault
    assert getattr(one, JUDGED).tokens == len(one.tokens) == 20


def test_a_function_whose_requests_are_not_heard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = host("slime", monkeypatch)
    own = dialogue(Namespace(_post=module._post), drifts=False)  # its own client, bound before ours stands there
    one = asyncio.run(own(Namespace(), sample(0), {}))
    with pytest.raises(InputError, match="turns_checked: no answer of the engine was heard"):
        mis.drop_broken_samples(Namespace(), [[one]])
