"""Engines that are stepped token by token, with new weights between steps: our own, or one of `true_on_policy`.

An engine such as SGLang samples one token a call. Between two calls it holds no request, so that the weights may move
there. An update empties the engine's prefix cache (`retract`, `abort`), or leaves it with keys and values of earlier
weights (`in_place`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lab.host.model.decoder import ModelConfig
from lab.host.model.decoding import Decoding, Drawn, Sampling, Unfinished
from lab.host.model.engine import DecodeEngine
from lab.host.rollout.served import Served
from lab.host.rollout.serving import SERVING
from true_on_policy.contract.sides import ENGINES
from true_on_policy.engines.protocol import EngineError, Request, Sample

RUNNING = 256
"""Sequences that the engine computes at a time, at most; a call with more takes several turns."""


class ServedSteps(Served):
    """The engine `name`, started by the first weights.

    Args:
        keep_cache: whether an update leaves the keys and values of earlier weights in the prefix cache.
    """

    def __init__(self, name: str, config: ModelConfig, precision: str, keep_cache: bool) -> None:
        super().__init__(config, lambda path: SERVING[name].start(path, precision, None, RUNNING))
        self.keeps_cache = keep_cache and "prefix cache" in ENGINES[name].abilities

    @property
    def decoder(self) -> ServedSteps:
        """The engine itself, which has the newest weights."""
        return self

    def one_token_each(self, responses: Sequence[Unfinished], temperature: float) -> list[Sample]:
        """Sample the next token of each response.

        Raises:
            EngineError: the engine fails, or names another version than the one that it was given.
        """
        assert self._engine is not None, "the first weights start it"
        samples = self._engine.generate(
            [Request(one.prompt + one.tokens, 1, one.seed + len(one.tokens), temperature) for one in responses]
        )
        if wrong := {sample.version for sample in samples} - {self.version}:
            raise EngineError(f"{self._engine.name}: tokens of version {wrong}, with weights of {self.version}")
        return samples

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Hand the weights over, between two calls."""
        self.hand_over(weights, version, self.keeps_cache)
        self.version = version

    def begin(self, responses: Sequence[Unfinished], sampling: Sampling) -> ServedDecoding:
        """Begin a batch of responses, which the caller steps."""
        return ServedDecoding(self, responses, sampling)


class ServedDecoding:
    """A batch of responses that grow by a token a call.

    stale_cache: whether the engine may compute over keys and values of weights before the present ones.
    """

    def __init__(self, engine: ServedSteps, responses: Sequence[Unfinished], sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._growing = [one for one in responses if len(one.tokens) < sampling.max_new_tokens]
        self.stale_cache = False

    @property
    def ended(self) -> bool:
        return not self._growing

    @property
    def unfinished(self) -> list[Unfinished]:
        """Responses that have not ended, with the tokens drawn so far."""
        return list(self._growing)

    def step(self) -> Drawn:
        """Draw the next token of every response."""
        samples = self._engine.one_token_each(self._growing, self._sampling.temperature)
        tokens = [sample.tokens[0] for sample in samples]
        grown = [replace(one, tokens=(*one.tokens, token)) for one, token in zip(self._growing, tokens, strict=True)]
        ended = [
            one.tokens[-1] == self._sampling.eos or len(one.tokens) == self._sampling.max_new_tokens for one in grown
        ]
        self._growing = [one for one, over in zip(grown, ended, strict=True) if not over]
        log_probs = [float(sample.log_probs[0]) for sample in samples]
        return Drawn([one.number for one in grown], tokens, log_probs, ended)

    def go_on(self, decoder: Any, *, keep_cache: bool) -> ServedDecoding:
        """Go on with the engine's present weights."""
        self.stale_cache = self.stale_cache or decoder.keeps_cache
        return self


Growing = Decoding | ServedDecoding
"""A batch of responses as the controller calls it."""
SteppedEngine = DecodeEngine | ServedSteps
"""An engine as the controller calls it: batches of responses are stepped, and go on under other weights."""


def stepped(name: str, config: ModelConfig, precision: str, keep_cache: bool) -> SteppedEngine:
    """Make the engine `name`; `keep_cache` says what an update does to a cache that outlives responses."""
    if name == "local":
        return DecodeEngine(config, precision)
    return ServedSteps(name, config, precision, keep_cache)
