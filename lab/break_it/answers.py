"""Room `answers`: an engine's answer, truncated, swapped, doubled or lying, as our generate functions read it.

An answer is right where it says what the honest one says, or where each of its own numbers can be trusted; else it must
be refused by an error of ours, since slime would wait for ever where another error is raised.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import stand_ins
from hypothesis import strategies as st

from mis_plugins.errors import InputError
from mis_plugins.hosts.versions import generate
from mis_plugins.hosts.versions.heads import NamedTokens
from mis_plugins.hosts.versions.rollouts import NUMBERING, Shelf
from mis_plugins.versions.spans import spans, written_by

K = 3
LIES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.sampled_from([2**40, 10**30, "\u00b2", "\u0663", "default", "3.0", -0.25, [[-0.5, 1, None]], 1e-9]),
)  # fmt: skip


@st.composite
def honest(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The chunks of an answer, each with what it has of all tokens so far, or of the new ones."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    count, whole, at, chunks = sum(lengths), draw(st.booleans()), 0, []
    rows = [[-0.5 - t / 8, t, None] for t in range(count)]
    tops = [[[-1.0 - place, 10 * t + place, None] for place in range(K)] for t in range(count)]
    for length in lengths:
        first, at = 0 if whole else at, at + length
        chunks.append({"text": "x" * (at - first), "meta_info": {
            "output_token_logprobs": rows[first:at], "output_top_logprobs": tops[first:at], "completion_tokens": at,
            "weight_version": "3", "finish_reason": {"type": "stop"} if at == count else None}})  # fmt: skip
    cut = draw(st.integers(0, count))
    named = [{"version": "3", "start": 0, "end": cut}, {"version": "4", "start": cut, "end": count}]
    chunks[-1]["meta_info"]["weight_versions"] = named
    return copy.deepcopy(chunks)


@st.composite
def cases(draw: st.DrawFn) -> list[dict[str, Any]]:
    chunks = draw(honest())
    for _ in range(draw(st.integers(0, 2))):
        holder: Any = chunks
        while True:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            if not keys:
                break
            key = draw(st.sampled_from(list(keys)))
            if isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 4)):
                holder = holder[key]
                continue
            edit = draw(st.sampled_from(["lie", "lie", "drop", "double", "swap"]))
            if edit == "drop":
                del holder[key]
            elif edit == "double" and isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            elif edit == "swap" and isinstance(holder, list):
                holder[key], holder[0] = holder[0], holder[key]
            else:
                holder[key] = copy.deepcopy(draw(LIES))  # the next edit may go into it
            break
    return chunks


class HTTPError(Exception):
    """What httpx raises where a stream breaks: a host brings httpx, and this pack does without."""


def install(patched: pytest.MonkeyPatch) -> None:
    stand_ins.load({"httpx": {"HTTPError": HTTPError, "RemoteProtocolError": HTTPError}}, patched)
    patched.setitem(vars(NUMBERING), "shelf", Shelf())


def judge(chunks: list[dict[str, Any]]) -> str:
    async def told() -> AsyncIterator[dict[str, Any]]:
        for chunk in chunks:
            yield copy.deepcopy(chunk)

    try:
        answer = asyncio.run(generate.heard(told(), 0))
        rows = answer["meta_info"]["output_token_logprobs"]
        runs = spans(answer["meta_info"], len(rows))
        head = NamedTokens.read(answer["meta_info"], len(rows), K)
    except InputError as error:
        assert len(str(error)) < 700
        return "our error"
    except HTTPError:
        return "asked again"
    versions = written_by(runs)
    assert len(versions) == len(rows) and all(isinstance(v, int) and 0 <= v < 2**63 for v in versions), versions
    assert all(isinstance(row[1], int) for row in rows), "a token that is no number"
    for ids, log_probs in zip(head.ids.tolist(), head.log_probs.tolist(), strict=True):
        named = [(i, x) for i, x in zip(ids, log_probs, strict=True) if i >= 0]
        assert len({i for i, _ in named}) == len(named), f"a token twice: {named}"
        mass = math.fsum(math.exp(x) for _, x in named if not math.isnan(x))
        assert mass <= 1.011, f"probabilities of {mass}"
    return "right"
