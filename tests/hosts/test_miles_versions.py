"""Versions of tokens inside Miles: from a stream of the engine to the notes that travel to the trainer."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import stand_in_hosts
from rollout_process import ROUTER, Sample, drawn, generated, streamed
from stand_in_hosts import LAYOUTS, Bodies, Output

from mis_plugins import mis
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.adapters.miles import NEEDS, Miles
from mis_plugins.hosts.versions import generate, kept
from mis_plugins.hosts.versions.rollouts import Numbering, Shelf
from mis_plugins.hosts.versions.samples import Note
from mis_plugins.versions.spans import Request, spans

KEY = NEEDS.notes


def shelf(numbering: Numbering) -> Shelf:
    assert isinstance(numbering.shelf, Shelf)
    return numbering.shelf


@pytest.fixture(autouse=True)
def fresh(numbering: Numbering, monkeypatch: pytest.MonkeyPatch) -> Numbering:
    monkeypatch.setattr(generate, "PAUSE_S", 0.0)
    return numbering


def test_a_note_tells_what_was_packed() -> None:
    note = Note(3, 9, [1, 1, 2, -1, -1, 2])
    assert Note.of(note.packed(), KEY) == note
    assert Note.of(Note(0, 0, []).packed(), KEY) == Note(0, 0, [])


@pytest.mark.parametrize("own", [["1", "2"], [], [1], ["1", 2, 3, 4]])
def test_versions_of_the_host_itself_are_no_note(own: list[Any]) -> None:
    with pytest.raises(InputError, match="convert_with_versions"):
        Note.of(own, KEY)


def test_what_runs_what_waits_and_what_travels_is_scored(fresh: Numbering) -> None:
    running, queued, travelling = Sample(), Sample(), Sample()
    numbers = [fresh.begin(sample, [7]) for sample in (running, queued, travelling)]
    for number in numbers:
        fresh.shelf.say(number, 0, [1, 2, 3], [4, 4, 5])
    fresh.shelf.take(batch := 0, [numbers[2]])
    del travelling
    found = shelf(fresh).waiting(4, batch - 1)
    assert {one.number for one in found.requests} == found.alive == set(numbers)
    assert found.requests[0] == Request(found.requests[0].number, (7, 1, 2), (0, 1))
    assert shelf(fresh).waiting(4, batch).alive == {*numbers[:2]}


def test_a_sample_that_the_host_drops_leaves(fresh: Numbering) -> None:
    sample = Sample()
    number = fresh.begin(sample, [7])
    fresh.shelf.say(number, 0, [1], [1])
    del sample
    other = fresh.begin(kept := Sample(), [7])
    assert shelf(fresh).waiting(1, -1).alive == {other} and kept is not None
    fresh.shelf.say(number, 1, [2], [1])  # the late token of a call that is cancelled


KEPT = [[11], [12, 5], [13], [14, 6]]


def chunks(incremental: bool, finish: str | None = "stop") -> AsyncIterator[dict[str, Any]]:
    """Four tokens: two chunks under version 3, one under 4."""
    rows, ends, sets = [[-0.5, 11], [-0.25, 12], [-1.5, 13], [-2.0, 14]], [1, 3, 4], {kept.MASK: KEPT}
    return streamed(rows, ends, [3, 3, 4, 4], heard=[3, 3, 4], incremental=incremental, finish=finish, **sets)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_is_heard_whole(incremental: bool, fresh: Numbering) -> None:
    sample = Sample()
    number = fresh.begin(sample, [7, 8])
    output = asyncio.run(generate.heard(chunks(incremental), number))
    assert output["text"] == "abcd"
    assert [row[1] for row in output["meta_info"]["output_token_logprobs"]] == [11, 12, 13, 14]
    assert output["meta_info"][kept.MASK] == KEPT and kept.LOG_PROBS not in output["meta_info"]
    assert shelf(fresh).waiting(3, -1).requests == [Request(number, (7, 8, 11, 12, 13), (0, 1, 2))]


def answer(count: Any, *rows: Any) -> dict[str, Any]:
    return {"text": "", "meta_info": {"output_token_logprobs": list(rows), "completion_tokens": count}}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([answer(3, [-1.0, 1])], "completion_tokens: 3"),
        ([answer(2, [-1.0, 1], [-1.0, 2]), answer(1, [-1.0, 1])], "1 log-probs after 2, and completion_tokens: 1"),
        ([{"error": {"message": "out of memory"}}], "the engine answered .*out of memory"),
        ([answer(1, [None, 1])], "a log-prob and a token in each entry"),
        ([answer(1, [-1.0, "x"])], "a log-prob and a token in each entry"),
        ([answer(None)], "the engine answered"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(sent: list[Any], message: str, fresh: Numbering) -> None:
    async def told() -> AsyncIterator[dict[str, Any]]:
        for chunk in sent:
            yield chunk

    with pytest.raises(InputError, match=message):
        asyncio.run(generate.heard(told(), 0))


def test_a_stream_that_ends_within_a_chunk_is_asked_for_again(fresh: Numbering) -> None:
    with pytest.raises(OSError, match="within a chunk"):
        generate._chunk(b'{"text": "ab')


def test_a_stream_that_breaks_is_asked_for_again(fresh: Numbering) -> None:
    number = fresh.begin(sample := Sample(), [7])
    streams = iter([chunks(False, finish=None), chunks(False)])
    output = asyncio.run(generate.answered(lambda: next(streams), number))
    assert output["text"] == "abcd" and shelf(fresh).waiting(3, -1).requests[0].tokens == (7, 11, 12, 13)
    assert sample is not None


def test_a_response_may_hold_what_other_ends_of_lines_are() -> None:
    text = "a\u0085b\u2028c\u2029d\x0be"
    sent = f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()

    async def parts() -> AsyncIterator[bytes]:
        for i in range(0, len(sent), 7):
            yield sent[i : i + 7]

    async def told() -> list[bytes]:
        return [line async for line in generate.lines(parts()) if line]

    first, last = asyncio.run(told())
    assert json.loads(first.removeprefix(b"data:")) == {"text": text} and last == b"data: [DONE]"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Bodies:
    monkeypatch.setattr(generate, "_stream", lambda url, payload, headers: chunks(True))
    return stand_in_hosts.load(LAYOUTS["August"], monkeypatch)


ARGS = Namespace(**ROUTER)


def test_the_versions_of_the_engine_stand_on_the_sample(host: Bodies, fresh: Numbering) -> None:
    sample = generated(ARGS, Sample()).samples
    assert sample.output_versions == [3, 3, 4, 4]  # the last chunk of version 3 held a token of version 4
    assert sample.weight_versions == ["3", "4"]
    assert shelf(fresh).waiting(3, -1).requests[0].positions == (0, 1)
    assert generated(ARGS, Sample(), evaluation=True) == Output("the host's own")


def test_an_answer_without_versions_is_raised_by_the_conversion(
    host: Bodies, fresh: Numbering, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Miles asks for another group, for ever, where a generate function raises."""
    monkeypatch.setattr(generate, "spans", lambda meta_info, count: spans({"weight_version": "5"}, count))
    sample = generated(ARGS, Sample()).samples
    assert "sample 0: " in caplog.text, "a job without our conversion reads it in its log"
    with pytest.raises(InputError, match="sample 0: .*no weight_versions"):
        converted(host, [sample])


def converted(host: Bodies, samples: Sequence[Any], **args: Any) -> dict[str, Any]:
    def own(args: Any, samples: Any, metadata: Any, **more: Any) -> dict[str, Any]:
        assert metadata == {} and more.pop("custom_reward_post_process_func") is json.loads
        assert set(more.values()) == {None}
        return {"tokens": [sample.tokens for sample in samples], "weight_versions": [["5"]] * len(samples)}

    host.conversion = own  # type: ignore[method-assign]
    given = Namespace(custom_reward_post_process_path="json.loads", mis={"segment_wise": {}}, **args)
    return mis.convert_with_versions(given, samples)


def test_train_data_holds_a_note_of_each_sample(host: Bodies, fresh: Numbering) -> None:
    samples = [drawn(fresh, [1, 2]), drawn(fresh, [2, 2, 2])]
    data = converted(host, samples)
    assert [Note.of(packed, KEY) for packed in data["weight_versions"]] == [
        Note(0, samples[0].response_number, [1, 2]),
        Note(0, samples[1].response_number, [2, 2, 2]),
    ]


def test_a_sample_of_another_generate_function_and_a_response_that_was_cut_are_refused(
    host: Bodies, fresh: Numbering
) -> None:
    with pytest.raises(InputError, match="sample 0: no output_versions; generate with --custom-generate"):
        converted(host, [Sample()])
    sample = drawn(fresh, [1, 2])
    sample.response_length = 1
    with pytest.raises(InputError, match="output_versions of 2 tokens, and the response has 1"):
        converted(host, [sample])


@pytest.mark.parametrize("flag", ["use_dynamic_global_batch_size", "multi_lora"])
def test_what_the_conversion_is_not_handed_is_refused(flag: str, host: Bodies) -> None:
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        converted(host, [], **{flag: True})


@pytest.mark.parametrize(("chunks", "multiple"), [(None, 1), (1, 1), (2, 4)])
def test_chunks_of_a_virtual_pipeline_ask_for_whole_groups_of_micro_batches(chunks: int | None, multiple: int) -> None:
    state = Namespace(vpp_size=chunks, microbatch_group_size_per_vp_stage=4)
    host: Any = Namespace(parallel=Namespace(get=lambda: lambda: state))
    assert Miles.virtual_pipeline(host, None) == (chunks or 1, multiple)
