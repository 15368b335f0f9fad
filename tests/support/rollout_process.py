"""The process of a host's rollouts in a test: Ray's interface over asyncio, and a numbering of the test's own."""

import asyncio
import inspect
import itertools
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest
import stand_in_hosts
import stand_ins

from mis_plugins import mis
from mis_plugins.hosts.versions import generate, rollouts, scores
from mis_plugins.hosts.versions.rollouts import Numbering


class Sample:
    """A sample as a host begins it, and slime's way to write tokens on it."""

    output_versions: list[int]
    response_number: int

    def __init__(self, index: int = 0) -> None:
        self.index, self.prompt, self.multimodal_inputs = index, (7, 8), None
        self.tokens: list[int] = []
        self.response_length, self.rollout_log_probs, self.weight_versions = 0, list[float](), list[Any]()

    def append_response_tokens(self, args: Any, *, tokens: Any, log_probs: Any, meta_info: Any) -> None:
        self.tokens += tokens
        self.response_length += len(tokens)
        self.rollout_log_probs += log_probs


def drawn(own: Numbering, versions: Sequence[int], index: int = 0) -> Sample:
    """A sample whose tokens are 0, 1, 2, ..., and were written by these versions."""
    sample, tokens = Sample(index), list(range(len(versions)))
    number = own.begin(sample, sample.prompt)
    finish(sample, tokens, versions)
    own.shelf.say(number, 0, tokens, versions)
    return sample


def finish(sample: Sample, tokens: Sequence[int], versions: Sequence[int]) -> None:
    """Write a whole response on a sample, as a generate function leaves it."""
    sample.tokens, sample.response_length = [*sample.prompt, *tokens], len(tokens)
    sample.output_versions, sample.rollout_log_probs = list(versions), [-1.0] * len(tokens)


async def streamed(
    rows: Sequence[Any],
    ends: Sequence[int],
    versions: Sequence[int],
    *,
    heard: Sequence[int] = (),
    incremental: bool = True,
    finish: str | None = "stop",
    **columns: Sequence[Any],
) -> AsyncIterator[dict[str, Any]]:
    """SGLang's stream of one response, whose chunks end at these tokens.

    rows: log-prob and token at each position; `columns` are further lists of the answer's `meta_info`.
    versions: which version wrote each token, as the last chunk names it.
    heard: the version that the engine has when it sends each chunk; that of the chunk's last token where none is given.
    finish: why the response ended; None for a stream that breaks off.
    """
    runs = [list(run) for _, run in itertools.groupby(range(len(versions)), versions.__getitem__)]
    named = [{"version": str(versions[run[0]]), "start": run[0], "end": run[-1] + 1} for run in runs]
    told = heard or [versions[end - 1] for end in ends]
    for version, (start, stop) in zip(told, itertools.pairwise((0, *ends)), strict=True):
        some, ended = slice(start if incremental else 0, stop), finish if stop == ends[-1] else None
        meta = {"completion_tokens": stop, "weight_version": str(version), "finish_reason": ended and {"type": ended}}
        meta |= {name: column[some] for name, column in {"output_token_logprobs": rows, **columns}.items()}
        yield {"text": "abcdefgh"[some], "meta_info": meta | ({"weight_versions": named} if ended else {})}


def generated(args: Any, sample: Any, evaluation: bool = False) -> Any:
    """What our generate function makes of Miles's request for a response."""
    asked = Namespace(args=args, sample=sample, state=None, sampling_params={}, evaluation=evaluation)
    return asyncio.run(mis.generate_with_versions(asked))


ROUTER = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": 1}


def generated_by_miles(
    monkeypatch: pytest.MonkeyPatch, stream: Callable[[Any], AsyncIterator[Any]], index: int = 0, **args: Any
) -> Any:
    """The sample that our generate function makes inside Miles, of an engine that answers a payload by this stream."""
    monkeypatch.setattr(generate, "_stream", lambda url, payload, headers: stream(payload))
    stand_in_hosts.load(stand_in_hosts.LAYOUTS["August"], monkeypatch)
    return generated(Namespace(**ROUTER, **args), Sample(index)).samples


class Remote:
    """An actor of a class: its coroutines run in one loop, beside the threads that wait for them."""

    def __init__(self, made: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._made, self._loop = made, loop

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self._made, name)(*given), self._loop)

        return Namespace(remote=remote)


class Ray:
    """What is used of Ray: asynchronous actors under a name."""

    def __init__(self) -> None:
        self.actors: dict[str, Remote] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def end(self) -> None:
        """Cancel what waits, so that no thread outlives its test."""

        async def cancelled() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(cancelled(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    def remote(self, made: type) -> Any:
        assert any(map(inspect.iscoroutinefunction, vars(made).values())), "Ray would run its calls one by one"

        def options(name: str, num_cpus: int) -> Any:
            assert num_cpus == 0, "a cluster whose CPUs are taken would never start it"
            return Namespace(remote=lambda: self.actors.setdefault(name, Remote(made(), self.loop)))

        return Namespace(options=options)

    def get_actor(self, name: str) -> Remote:
        if name not in self.actors:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return self.actors[name]

    def names(self) -> dict[str, Any]:
        errors = Namespace(RayError=(CancelledError, RuntimeError))
        return {
            "remote": self.remote,
            "get_actor": self.get_actor,
            "get": lambda future: future.result(),
            "exceptions": errors,
        }


def alone_in_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the carried trainer a torch.distributed of one rank, as far as it asks."""
    alone = Namespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
        new_group=lambda **_: None,
        broadcast_object_list=lambda found, src, group: None,
        all_gather_object=lambda parts, own, group: parts.__setitem__(0, own),
    )
    monkeypatch.setattr(scores, "dist", alone)
    monkeypatch.setattr(scores, "timeout", lambda: None)


@contextmanager
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Numbering]:
    """Samples, Ray's actors and the host's client of one test alone."""
    ray = Ray()
    client = {"HTTPError": OSError, "RemoteProtocolError": OSError}
    stand_ins.load({"ray": ray.names(), "httpx": client}, monkeypatch)
    own = Numbering(rollouts.opened)
    for place in (generate, rollouts):
        monkeypatch.setattr(place, "NUMBERING", own)
    yield own
    ray.end()
