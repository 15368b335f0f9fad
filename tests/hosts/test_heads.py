"""The engine's likeliest tokens: asked of SGLang by our generate functions, and carried to the loss hook's batch."""

import asyncio
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import rollout_process
import stand_in_hosts
import stand_ins
from rollout_process import Sample, alone_in_world, generated_by_miles, streamed
from stand_in_hosts import LAYOUTS, VOCABULARY
from test_every_hook import LOSS, trained

from mis_plugins import mis
from mis_plugins.errors import InputError
from mis_plugins.hosts.host import HEAD_IDS, HEAD_LOG_PROBS
from mis_plugins.hosts.versions import generate, heads
from mis_plugins.hosts.versions.heads import HEAD, NamedTokens
from mis_plugins.hosts.versions.rollouts import Numbering
from mis_plugins.hosts.versions.samples import Note

pytestmark = pytest.mark.usefixtures("numbering")

K = 3
NEEDED = {HEAD: "mis.center"}
CENTER = {"center": {"top_k": K}, "weight": None, "objective": {"old": "behavior", "surrogate": "reinforce"}}


def row(position: int) -> list[list[Any]]:
    """What SGLang says of one position, and one token more than is asked for."""
    return [[-1.0 * (place + 1) - position / 8, (3 * position + place) % VOCABULARY, None] for place in range(K + 1)]


def expected(*positions: int | None) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and log-probs of these positions; None is a position of which the engine said nothing."""
    nothing = [[-float("inf"), -1]] * K
    rows = [nothing if position is None else row(position)[:K] for position in positions]
    return [[pair[1] for pair in one] for one in rows], [[pair[0] for pair in one] for one in rows]


def told(head: NamedTokens) -> tuple[list[list[int]], list[list[float]]]:
    assert (head.ids.dtype, head.log_probs.dtype) == (np.int32, np.float32)
    return head.ids.tolist(), head.log_probs.tolist()


def spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    return [{"version": str(version), "start": i, "end": i + 1} for i, version in enumerate(versions)]


# ----------------------------------------------------------------------------------------------------------- Miles


def stream(payload: Any, incremental: bool = True) -> AsyncIterator[dict[str, Any]]:
    """Four tokens in two chunks, with as many likeliest tokens at each as the request asks for."""
    k = payload.get("top_logprobs_num", 0)
    named: dict[str, Any] = {"output_top_logprobs": [row(position)[:k] for position in range(4)]} if k else {}
    return streamed([[-1.0, i] for i in range(4)], [1, 4], [3] * 4, incremental=incremental, **named)


@pytest.mark.parametrize("incremental", [False, True])
def test_miles_leaves_the_head_of_a_stream_on_the_sample(incremental: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = generated_by_miles(monkeypatch, partial(stream, incremental=incremental), mis=CENTER)
    assert told(getattr(sample, HEAD)) == expected(0, 1, 2, 3)


def test_a_stream_that_is_asked_for_again_has_the_head_of_its_last_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PAUSE_S", 0.0)
    tries = []

    async def broken(payload: Any) -> AsyncIterator[dict[str, Any]]:
        tries.append(1)
        async for chunk in stream(payload):
            yield chunk
            if len(tries) == 1:
                raise OSError

    output = asyncio.run(generate.answered(lambda: broken({"top_logprobs_num": K}), 0))
    head = NamedTokens.read(output["meta_info"], 4, K)
    assert told(head) == expected(0, 1, 2, 3) and len(tries) == 2


@pytest.mark.parametrize(
    "args",
    [{"mis": {"weight": {"upper": 2.0}}}, {"mis": CENTER, "rollout_top_logprobs_num": 8}],
    ids=["does not center", "the host asks"],
)
def test_nothing_is_asked_for_where_nobody_reads_it_or_the_host_asks(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hasattr(generated_by_miles(monkeypatch, stream, **args), HEAD)


# ----------------------------------------------------------------------------------------------------------- slime


SGLANG = "slime.rollout.sglang_rollout"


def slime(monkeypatch: pytest.MonkeyPatch, *calls: Sequence[int]) -> list[dict[str, Any]]:
    """slime's module: call i answers with tokens at the positions `calls[i]`; the requests that were posted."""
    left, requests = list(calls), list[dict[str, Any]]()

    async def post(url: str, payload: dict[str, Any], headers: Any = None) -> dict[str, Any]:
        requests.append(payload)
        positions = left.pop(0)
        meta: dict[str, Any] = {"weight_versions": spans([1] * len(positions))} if positions else {}
        if k := payload.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [row(position)[:k] for position in positions]
        return {"positions": positions, "meta_info": meta}

    async def own(args: Any, sample: Any, sampling_params: Any) -> Any:
        answer = await sys.modules[SGLANG].post("http://one", {"return_logprob": True}, headers=None)
        count = len(answer["positions"])
        sample.append_response_tokens(args, tokens=[5] * count, log_probs=[-1.0] * count, meta_info=answer["meta_info"])

    stand_ins.load({SGLANG: {"generate": own, "post": post}}, monkeypatch)
    return requests


def called(sample: Any, **args: Any) -> None:
    asyncio.run(mis.generate_with_versions(Namespace(**args), sample, {}))


def a_tool_writes(sample: Any) -> None:
    sample.append_response_tokens(None, tokens=[1, 1], log_probs=[0.0] * 2, meta_info={})


def begins_anew(sample: Any) -> None:
    sample.tokens, sample.response_length = [], 0


@pytest.mark.parametrize(
    ("calls", "between", "positions"),
    [
        ([[0, 1], [], [2]], lambda sample: None, [0, 1, 2]),  # aborted, aborted before a token, finished
        ([[0, 1], [2]], a_tool_writes, [0, 1, None, None, 2]),
        ([[0, 1], [2]], begins_anew, [2]),
    ],
)
def test_slime_asks_in_every_call_and_joins_what_the_calls_name(
    calls: list[list[int]], between: Callable[[Any], None], positions: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that no call wrote have an empty head, and a response that begins anew has a head of its own."""
    requests, sample = slime(monkeypatch, *calls), Sample()
    for number in range(len(calls)):
        if number:
            between(sample)
        called(sample, mis=CENTER)
    assert told(getattr(sample, HEAD)) == expected(*positions)
    assert [request["top_logprobs_num"] for request in requests] == [K] * len(calls)


def test_jobs_that_do_not_center_post_the_hosts_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = slime(monkeypatch, [0], [1], [2])
    for mapping in ({"weight": {"upper": 2.0}}, CENTER, {"weight": {"upper": 2.0}}):
        called(Sample(), mis=mapping)
    assert ["top_logprobs_num" in request for request in requests] == [False, True, False]


# ------------------------------------------------------------------------------------------------------- on the way


def drawn(own: Numbering, positions: Sequence[int], index: int = 0) -> Any:
    """A sample with the engine's head at each of these positions."""
    sample = rollout_process.drawn(own, [1] * len(positions), index)
    meta = {"output_top_logprobs": [row(position)[:K] for position in positions]}
    setattr(sample, HEAD, NamedTokens.read(meta, len(positions), K))
    return sample


def test_a_note_tells_the_head_that_was_packed(numbering: Numbering) -> None:
    (packed,) = numbering.noted([drawn(numbering, [0, 2])], scored=False, needed=NEEDED)
    note = Note.of(packed, "notes")
    assert note.versions == [1, 1]
    assert [len(one) for one in note.more.values()] == [4 * 2 * K] * 2, "8 k bytes a token"
    found = heads.unpacked(note.more, 2)
    assert (found[HEAD_IDS].tolist(), found[HEAD_LOG_PROBS].tolist()) == expected(0, 2)
    assert all(len(one) == 0 for one in heads.unpacked({HEAD_IDS: b"", HEAD_LOG_PROBS: b""}, 0).values())


def test_samples_without_their_head_are_refused(numbering: Numbering) -> None:
    sample = drawn(numbering, [0, 1], index=4)
    sample.response_length, sample.output_versions = 3, [1] * 3
    with pytest.raises(InputError, match="sample 4: output_head of 2 tokens, and the response has 3"):
        numbering.noted([sample], scored=False, needed=NEEDED)
    delattr(sample, HEAD)
    with pytest.raises(InputError, match="sample 4: no output_head, which mis.center reads"):
        numbering.noted([sample], scored=False, needed=NEEDED)
    assert numbering.noted([sample], scored=False)


def test_an_engine_that_names_no_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="output_top_logprobs of 0 tokens, and the answer has 2"):
        NamedTokens.read({}, 2, K)
    with pytest.raises(InputError, match="names no token at any of 2 positions"):
        NamedTokens.read({"output_top_logprobs": [None, []]}, 2, K)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([[-1.0, 4, None], [-2.0, 4, None]], "names a token twice"),
        ([[-0.1, 4, None], [-0.2, 5, None]], "names probabilities of more than 1"),
        ([[None, 4, None]], "each entry needs a log-prob"),
        ([[-1.0, 2**40, None]], "each entry needs a log-prob, and the id of a token"),
        ([[-1.0, 4.5, None]], "the id of a token"),
        ([[-1.0]], "the id of a token"),
        ([None], "the id of a token"),
    ],
)
def test_a_head_that_no_distribution_has_is_refused(named: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"output_top_logprobs\[1\].*{message}"):
        NamedTokens.read({"output_top_logprobs": [row(0), named]}, 2, K)


@pytest.mark.parametrize("name", ["August", "slime"])
def test_a_step_of_the_hosts_trainer_is_centered(
    name: str, numbering: Numbering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the notes of three samples to the metrics of the loss hook."""
    alone_in_world(monkeypatch)
    host = stand_in_hosts.load(LAYOUTS[name], monkeypatch)
    samples = [drawn(numbering, positions, i) for i, positions in enumerate(([0, 1], [4], [2]))]
    notes = numbering.noted(samples, scored=False, needed=NEEDED)
    data: dict[str, Any] = stand_in_hosts.data_of(samples)
    data[host.layout.needs.notes] = notes
    init = "mis_plugins.mis.carry_versions"
    answers = trained(host, data, mis=CENTER | {"metrics": "full"}, custom_megatron_init_path=init, **LOSS)
    assert data[HEAD_IDS][0].tolist() == expected(0, 1)[0], "the host dumps what it trained on"
    logged = [metrics for _, metrics in answers]
    assert all(loss.isfinite() for loss, _ in answers)
    assert sum(float(metrics["center_drift"]) for metrics in logged) > 0
    assert not any(float(metrics["center_missing"]) for metrics in logged)
