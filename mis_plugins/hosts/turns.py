"""Turns of a sample: whether the trainer learns from the tokens that the engine sampled, behind the engine's prompt.

A generate function that hands a conversation on as text has it tokenized again, by the engine or by itself. Then the
log-probs of a turn are those of other tokens, or of other tokens before it (verl#6719, ms-swift#10012).
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import Any

from mis_plugins.errors import logger
from mis_plugins.hosts.needs import Need
from mis_plugins.hosts.registry import every_host

JUDGED = "judged_turns"  # the attribute of a sample
NOT_HEARD = "no answer of the engine was heard"
REQUEST = "utils.http_utils:_post"  # of each host's package
Ids = Sequence[int]


@dataclass(frozen=True)
class Answer:
    """One answer of the engine.

    given: how many tokens the engine was given.
    prompt: their ids; None where the engine was given a text.
    tokens: ids of the tokens that it sampled.
    """

    given: int
    prompt: Ids | None
    tokens: Ids

    def serves(self, tokens: Ids, place: int, end: int) -> int:
        """How many tokens from `place` on this answer sampled; 0 where a token or the prompt is another."""
        count = min(len(self.tokens), end - place)
        sampled = self.given == place and list(self.tokens[:count]) == list(tokens[place : place + count])
        return count if sampled and self.agreed(tokens) >= place else 0

    def agreed(self, tokens: Ids) -> int:
        """How many leading tokens equal this answer behind its prompt."""
        prompt = tokens[: self.given] if self.prompt is None else self.prompt
        pairs = enumerate(zip([*prompt, *self.tokens], tokens, strict=False))
        return next(
            (i for i, (ours, theirs) in pairs if ours != theirs), min(self.given + len(self.tokens), len(tokens))
        )


@dataclass(frozen=True)
class Judged:
    """The first `tokens` tokens of a sample were judged; `fault` names the first turn that no answer has."""

    tokens: int
    fault: str | None


HEARD: ContextVar[list[Answer] | None] = ContextVar("answers", default=None)


def turns_checked(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a generate function of Miles or slime, so that the turns of its samples are compared with the engine's.

    Answers of `/generate` are heard where the host posts its requests, in this process. A turn is a run of tokens in
    the loss. The log names the first turn of a sample that no answer has, and `drop_broken_samples` takes the sample
    out of the loss.
    """

    @wraps(generate)
    async def checked(*given: Any, **named: Any) -> Any:
        _listen()
        answers: list[Answer] = []
        token = HEARD.set(answers)
        try:
            generated = await generate(*given, **named)
        finally:
            HEARD.reset(token)
        for sample in flat(getattr(generated, "samples", generated)):
            judge(sample, answers)
        return generated

    return checked


def judge(sample: Any, answers: Sequence[Answer]) -> None:
    """Judge the tokens that no earlier call has judged, and leave the verdict on the sample."""
    tokens, before = listed(sample.tokens), getattr(sample, JUDGED, None)
    if before is None or not answers or answers[0].given != before.tokens:
        before = Judged(0, None)
    fault = before.fault or fault_of(tokens, list(_turns(sample, len(tokens))), answers, before.tokens)
    setattr(sample, JUDGED, Judged(len(tokens), fault))
    if fault:
        logger.warning("sample %s of group %s: %s", sample.index, sample.group_index, fault)


def fault_of(tokens: Ids, turns: Sequence[tuple[int, int]], answers: Sequence[Answer], start: int = 0) -> str | None:
    """Name the first turn with a token from `start` on that no answer has at its place; None where there is none."""
    for turn, (begin, end) in enumerate(turns, 1):
        place = max(begin, start)
        while place < end:
            count = max((answer.serves(tokens, place, end) for answer in answers), default=0)
            if not count:
                return _fault_at(turn, tokens, place, answers)
            place += count
    return None


def _fault_at(turn: int, tokens: Ids, place: int, answers: Sequence[Answer]) -> str:
    if not answers:
        return NOT_HEARD
    nearest = min(answers, key=lambda answer: (abs(answer.given - place), -answer.agreed(tokens)))
    agreed = nearest.agreed(tokens)
    if agreed < nearest.given:
        return f"turn {turn}: the engine was given other tokens than the trainer has, the first at {agreed}"
    if nearest.given != place:
        return f"turn {turn}: begins behind {place} tokens, and the engine answered behind {nearest.given}"
    return f"turn {turn}: the engine sampled other tokens than the trainer has, the first at {agreed}"


def _turns(sample: Any, total: int) -> Iterator[tuple[int, int]]:
    """Where each run of tokens in the loss begins and ends among the sample's tokens."""
    length = int(sample.response_length)
    place = total - length
    mask = [1] * length if sample.loss_mask is None else listed(sample.loss_mask)
    for in_loss, run in groupby(map(bool, mask)):
        end = place + len(list(run))
        if in_loss:
            yield place, end
        place = end


def _listen() -> None:
    """Have each loaded host's request tell the task what the engine answered; a registered host has its own engine."""
    for host in (host for host in every_host().values() if host.told_by != "registration"):
        address = f"{host.package}.{REQUEST}"
        need = Need(host.title, "its request to the engine", ("turns_checked",), (address,), ("url", "payload"))
        own = need.loaded()
        if own is not None and not hasattr(own, "hears"):
            module, name = need.owner()
            setattr(module, name, _hearing(own))


def _hearing(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    async def heard(client: Any, url: str, payload: Any, *rest: Any, **more: Any) -> Any:
        output, answers = await own(client, url, payload, *rest, **more), HEARD.get()
        if answers is not None and url.endswith("/generate"):
            meta, prompt = output["meta_info"], payload.get("input_ids")
            rows = meta.get("output_token_logprobs")
            ids = output.get("output_ids", []) if rows is None else [row[1] for row in rows]
            given = meta["prompt_tokens"] if prompt is None else len(prompt)
            answers.append(Answer(given, None if prompt is None else list(prompt), ids))
        return output

    heard.hears = True  # type: ignore[attr-defined]
    return heard


def listed(values: Any) -> list[Any]:
    """The entries of a list, tensor or array; none of a None, nor of a number or of what can be read once alone."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return list(values) if isinstance(values, Sized) and isinstance(values, Iterable) else []


def flat(data: Any) -> Iterator[Any]:
    """The samples in order, whatever lists they are in; None is no sample."""
    if isinstance(data, Iterable) and not hasattr(data, "remove_sample"):
        for item in data:
            yield from flat(item)
    elif data is not None:
        yield data
