"""The rollout engine of the embedded host: batched decoding with a KV cache, in a precision of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.host.model.decoder import Decoder, ModelConfig
from lab.host.model.decoding import Decoding, Sampling, Unfinished
from lab.host.model.quantize import LINEAR, at_precision
from mis_plugins.errors import ConfigError, InputError


@dataclass(frozen=True)
class Generation:
    """One sampled response.

    tokens: token ids; the last one is EOS unless the response was cut at `max_new_tokens`.
    log_probs: log-probability of each token under the distribution it was drawn from, after temperature.
    version: version of the weights that drew the response.
    routes: experts of each token of prompt and response but the last, layer by layer, as SGLang returns them; None
        in a dense model, and from an engine that does not tell.
    kept: the tokens that each token was sampled from; None where that is the whole vocabulary.
    named: the engine's likeliest tokens at each position, and their log-probs; None where none are asked for.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    routes: Int[Tensor, "N L K"] | None = field(default=None, compare=False)
    kept: tuple[tuple[int, ...], ...] | None = None
    named: tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]] | None = field(default=None, compare=False)


@runtime_checkable
class RolloutEngine(Protocol):
    """A rollout engine as the loop calls it: a `DecodeEngine`, or a `ServedEngine` around another engine."""

    version: int

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take copies of all parameters, by Hugging Face Qwen3 name, float32, matrices [out, in]."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Generation]:
        """Sample one response a prompt.

        `seeds[i]` alone decides the randomness of response `i`: batched with others or alone, it is the
        same response, up to float rounding.
        """
        ...

    def close(self) -> None:
        """Free the weights; the engine is of no use afterwards."""
        ...


class DecodeEngine:
    """The local `RolloutEngine`.

    Args:
        precision: `fp32`, `bf16`, `int8`, `int4` or `int3`; see `model/quantize.py`.
    """

    def __init__(self, config: ModelConfig, precision: str) -> None:
        if precision not in LINEAR:
            raise ConfigError(f"--rollout-weights: got {precision!r}; choose one of {', '.join(LINEAR)}")
        self.config, self.precision, self.version = config, precision, -1
        self._decoder: Decoder | None = None

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        held = {name: at_precision(name, weight, self.precision) for name, weight in weights.items()}
        self._decoder, self.version = Decoder(self.config, held), version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Generation]:
        if not prompts:
            return []
        rows = enumerate(zip(prompts, seeds, strict=True))
        responses = [Unfinished(row, tuple(prompt), (), seed) for row, (prompt, seed) in rows]
        decoding = self.begin(responses, sampling)
        log_probs: list[list[float]] = [[] for _ in prompts]
        named: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        while not decoding.ended:
            drawn = decoding.step()
            for row, log_prob in zip(drawn.numbers, drawn.log_probs, strict=True):
                log_probs[row].append(log_prob)
            if drawn.named is not None:
                for row, ids, scores in zip(drawn.numbers, *drawn.named, strict=True):
                    named[row].append((ids, scores))
        made = zip(decoding.responses, log_probs, decoding.routes or [None] * len(prompts), named, strict=True)
        return [
            Generation(one.tokens, tuple(scores), self.version, routes, named=_joined(heads))
            for one, scores, routes, heads in made
        ]

    def begin(self, responses: Sequence[Unfinished], sampling: Sampling) -> Decoding:
        """Begin a batch of responses, which the caller steps."""
        return Decoding(self.decoder, responses, sampling)

    def close(self) -> None:
        self._decoder = None

    @property
    def decoder(self) -> Decoder:
        """The weights of `version`, at this engine's precision."""
        if self._decoder is None:
            raise InputError("the rollout engine holds no weights; call update_weights first")
        return self._decoder


def _joined(heads: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """The likeliest tokens of a response, position after position; None where none were named."""
    return (torch.stack([ids for ids, _ in heads]), torch.stack([row for _, row in heads])) if heads else None
