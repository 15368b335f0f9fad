"""Each host's own generation of a response, with the version of every token left on the sample.

slime answers call by call: an update ends every call, and the host continues the response in another. Miles's
single-turn generation is read token by token, so that the trainer can score running responses. SGLang names the
version of each token when a call ends. Until then each chunk of the stream counts as written by the version that the
engine has when it sends the chunk: exact if each token is sent by itself (`--sglang-stream-interval 1`).
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from operator import index
from typing import Any

from mis_plugins.errors import InputError, cut, logger
from mis_plugins.hosts.adapters.miles import NEEDS
from mis_plugins.hosts.adapters.slime import SLIME
from mis_plugins.hosts.needs import more_of
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.versions import heads, kept
from mis_plugins.hosts.versions.rollouts import NUMBERING
from mis_plugins.hosts.versions.samples import FAULT, NUMBER, VERSIONS, hear_retractions
from mis_plugins.versions.spans import spans, written_by

MORE = ("output_top_logprobs", kept.MASK, kept.LOG_PROBS)  # lists of a chunk, beside its log-probs
LONGEST_ANSWER = 300  # letters that an error quotes of what is no answer
TRIES, PAUSE_S = 60, 1.0  # of a request that fails, as the host's own
Chunk = Mapping[str, Any]
Row = list[Any]  # log-prob and token, as SGLang lists them


@Hook
async def generate_with_versions(
    input: Any, sample: Any = None, sampling_params: Any = None, evaluation: bool = False
) -> Any:
    """The generate function of Miles and slime: the host's own, with the version of every token on the sample.

    With `mis.center` the engine also names its likeliest tokens at each position, which stand on the sample too.

    Miles calls it with `input` alone, and needs `--sglang-stream-interval 1` and
    `--sglang-incremental-streaming-output` beside it. slime calls it as
    `(args, sample, sampling_params, evaluation)`. An evaluation runs the host's own function unchanged.

    Raises:
        InputError: on Miles, the stream of an answer lies. What an answer lacks, `convert_with_versions` raises.
    """
    return await (miles(input) if sample is None else slime(input, sample, sampling_params, evaluation))


async def miles(input: Any) -> Any:
    """Generate one response as Miles does, and leave on the sample which version wrote each of its tokens."""
    args, sample, own = input.args, input.sample, NEEDS.single_turn.get()
    if input.evaluation or sample.response_length:
        return await own(input)
    output_of = inspect.signature(own, eval_str=True).return_annotation
    prompt, request = NEEDS.prompt_ids.get()(input.state, sample), NEEDS.payload.get()
    payload, halted = request(
        args,
        input_ids=prompt,
        sampling_params=input.sampling_params,
        multimodal_inputs=sample.multimodal_inputs,
        **more_of(request, input, sample),
    )
    number = NUMBERING.begin(sample, prompt)
    if payload is None:
        sample.status = halted
        return output_of(samples=sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    headers = NEEDS.headers.get()(args, sample)
    k, cut = heads.wanted(args, NEEDS.asks_for_head), kept.asked(args)
    asked = {**payload, "stream": True} | ({"top_logprobs_num": k} if k and not cut else {})
    asked |= kept.request(k) if cut else {}
    output = await answered(lambda: _stream(url, asked, headers), number)
    if cut:
        with _raised_by_the_conversion(sample):
            output["meta_info"], sets = kept.over_sets(output["meta_info"], k)
            setattr(sample, kept.KEPT, sets)
    await NEEDS.update_sample.get()(args, sample, payload=payload, output=output)
    with _raised_by_the_conversion(sample):
        hear_retractions(sample, output["meta_info"], 0)
        if k:
            heads.extend(sample, output["meta_info"], 0, k)
        runs = spans(output["meta_info"], sample.response_length)
        # The newest Miles has itself put the spans of each call there, and reads them again.
        if not any(hasattr(call, "spans") for call in sample.weight_versions):
            sample.weight_versions = [str(version) for version, _, _ in runs]
        _name_versions(sample, written_by(runs))
    return output_of(samples=sample)


@contextmanager
def _raised_by_the_conversion(sample: Any) -> Iterator[None]:
    """Keep the first error on the sample, and let the conversion of the rollout raise it.

    An error raised within a generate function stops no run: slime logs it and waits for the group for ever, and Miles
    logs it and asks for another group, for ever.
    """
    try:
        yield
    except Exception as error:
        if not hasattr(sample, FAULT):
            setattr(sample, FAULT, str(error) if isinstance(error, InputError) else repr(error))
            logger.error("sample %s: %s", sample.index, getattr(sample, FAULT))


async def slime(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool) -> Any:
    """Generate, or continue, one response as slime does, and add to the sample who wrote the new tokens."""
    own = SLIME.generation.get()
    if evaluation:
        return await own(args, sample, sampling_params)
    before, k = sample.response_length, heads.wanted(args)
    with _answers_to(sample) as answers, _asking(k):
        await own(args, sample, sampling_params)
    if answers and sample.response_length > before:
        with _raised_by_the_conversion(sample):
            hear_retractions(sample, answers[-1], before)
            _continue(sample, before, answers[-1])
            if k:
                heads.extend(sample, answers[-1], before, k)
    return sample


@contextmanager
def _answers_to(sample: Any) -> Iterator[list[Mapping[str, Any]]]:
    """Collect the engine's `meta_info` of each answer, which slime hands to the sample alone."""
    answers: list[Mapping[str, Any]] = []
    append = sample.append_response_tokens

    def listening(*given: Any, **named: Any) -> Any:
        answers.append(named["meta_info"])
        return append(*given, **named)

    sample.append_response_tokens = listening
    try:
        yield answers
    finally:
        del sample.append_response_tokens


@contextmanager
def _asking(k: int) -> Iterator[None]:
    """Have the requests of this task ask for the k likeliest tokens at each position."""
    if k:
        heads.ask_through(SLIME.post)
    token = heads.ASKED.set(k)
    try:
        yield
    finally:
        heads.ASKED.reset(token)


def _continue(sample: Any, before: int, meta_info: Mapping[str, Any]) -> None:
    """Add the versions of the tokens from `before` on to the versions of earlier calls."""
    new = written_by(spans(meta_info, sample.response_length - before))
    earlier = getattr(sample, VERSIONS, []) if before else []
    if not before or not NUMBERING.known(sample):
        NUMBERING.begin(sample, sample.tokens[: len(sample.tokens) - sample.response_length])
    _name_versions(sample, [*earlier, *new])


def _name_versions(sample: Any, versions: list[int]) -> None:
    """Write on the sample, and tell the shelf, which version wrote each of its tokens."""
    setattr(sample, VERSIONS, versions)
    if len(versions) == sample.response_length:  # else the conversion refuses the sample
        response = sample.tokens[len(sample.tokens) - sample.response_length :]
        NUMBERING.shelf.say(getattr(sample, NUMBER), 0, response, versions)


async def answered(stream: Callable[[], AsyncIterator[Chunk]], number: int) -> dict[str, Any]:
    """The answer of one call, put together from its stream; a stream that breaks is asked for again."""
    import httpx  # type: ignore[import-not-found]

    for left in range(TRIES - 1, 0, -1):
        try:
            return await heard(stream(), number)
        except httpx.HTTPError as error:
            logger.info("generate: %s; asked again, %d tries left", error, left)
            NUMBERING.shelf.say(number, 0, [], [])
            await asyncio.sleep(PAUSE_S)
    return await heard(stream(), number)


async def heard(chunks: AsyncIterator[Chunk], number: int) -> dict[str, Any]:
    """Read a stream to its end, telling the shelf of each token. A chunk holds all tokens, or only new ones.

    Raises:
        InputError: a chunk that does neither, or that is no answer.
        httpx.RemoteProtocolError: the stream ends before the response does.
    """
    import httpx  # type: ignore[import-not-found]

    rows: list[Row] = []
    more: dict[str, list[Any]] = {name: [] for name in MORE}
    versions: list[int] = []
    text, meta = "", {}
    async for chunk in chunks:
        new_text, meta, log_probs, count = _parts_of(chunk)
        whole = len(log_probs) == count
        if (len(log_probs) < len(rows)) if whole else (len(rows) + len(log_probs) != count):
            raise InputError(f"meta_info: {len(log_probs)} log-probs after {len(rows)}, and completion_tokens: {count}")
        new = log_probs[len(rows) :] if whole else log_probs
        text = new_text if whole else text + new_text
        versions += [_version(meta)] * len(new)
        NUMBERING.shelf.say(number, len(rows), [row[1] for row in new], versions[len(rows) :])
        rows += new
        for name, column in more.items():
            column += (meta.get(name) or [])[len(column) if whole else 0 :]
    if not meta.get("finish_reason"):
        raise httpx.RemoteProtocolError("the stream ended before the response did")
    more = {name: column for name, column in more.items() if column}
    return {"text": text, "meta_info": {**meta, "output_token_logprobs": rows, **more}}


def _parts_of(chunk: Any) -> tuple[str, Chunk, list[Row], int]:
    """Text, `meta_info`, log-probs with their tokens, and the number of tokens, of one chunk."""
    try:
        meta = chunk["meta_info"]
        rows, *_ = ((meta.get(name) or []) + [] for name in ("output_token_logprobs", *MORE))
        _ = [(row[0] + 0.0, index(row[1])) for row in rows]
        return chunk["text"] + "", meta, rows, index(meta.get("completion_tokens", 0))
    except (LookupError, TypeError, AttributeError):
        raise InputError(
            f"the engine answered {cut(repr(chunk), LONGEST_ANSWER)}; expected text, and meta_info with a log-prob and "
            "a token in each entry of output_token_logprobs"
        ) from None


def _version(meta: Mapping[str, Any]) -> int:
    """The engine's version; -1 where it has no number yet, so that nothing is scored."""
    version = str(meta.get("weight_version"))
    return int(version) if version.isdecimal() else -1


async def _stream(url: str, payload: Mapping[str, Any], headers: Mapping[str, str] | None) -> AsyncIterator[Chunk]:
    async with _client().stream("POST", url, json=payload, headers=headers) as response:
        response.raise_for_status()
        async for line in lines(response.aiter_bytes()):
            if line.startswith(b"data:") and (data := line.removeprefix(b"data:").strip()) != b"[DONE]":
                yield _chunk(data)


def _chunk(data: bytes) -> Chunk:
    import httpx  # type: ignore[import-not-found]

    try:
        return json.loads(data)
    except ValueError as error:
        raise httpx.RemoteProtocolError(f"the stream ended within a chunk: {error}") from error


async def lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The lines of a stream, cut at line feeds alone.

    httpx's own `aiter_lines` also cuts where a response holds U+0085, U+2028 or U+2029, which JSON need not escape.
    """
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    yield rest


@cache
def _client() -> Any:
    """One client for this process: the host runs all rollouts on one event loop."""
    import httpx  # type: ignore[import-not-found]

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=httpx.Timeout(None), limits=limits)
