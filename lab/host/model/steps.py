"""Engines that are stepped token by token, with new weights between steps; engine `hf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.host.model.decoder import LeftPadded, ModelConfig
from lab.host.model.decoding import Decoding, Drawn, Sampling, Unfinished
from lab.host.model.engine import DecodeEngine
from mis_plugins.errors import InputError


@runtime_checkable
class Growing(Protocol):
    """A batch of responses as the controller calls it: a `Decoding` or a `ServedDecoding`."""

    stale_cache: bool

    @property
    def ended(self) -> bool: ...

    @property
    def unfinished(self) -> list[Unfinished]: ...

    def step(self) -> Drawn: ...

    def go_on(self, decoder: Any, *, keep_cache: bool) -> Growing: ...


@runtime_checkable
class SteppedEngine(Protocol):
    """An engine as the controller calls it: batches of responses are stepped, and go on under other weights."""

    version: int

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None: ...

    def begin(self, responses: Sequence[Unfinished], sampling: Sampling) -> Growing: ...

    @property
    def decoder(self) -> Any: ...

    def close(self) -> None: ...


class HuggingFaceCache:
    """Keys and values as transformers keeps them. used: slots that hold a token; present: 0 where one is padding."""

    def __init__(self, batch: LeftPadded) -> None:
        from transformers import DynamicCache

        slots = torch.arange(batch.tokens.shape[1])
        self.present = (slots >= batch.padding[:, None]).long()
        self.keys_and_values = DynamicCache()
        self.used = 0


class HuggingFaceDecoder:
    """A model of transformers with the methods of `Decoder` that a `Decoding` calls."""

    def __init__(self, config: ModelConfig, model: Any) -> None:
        self._config, self.model = config, model

    @property
    def config(self) -> ModelConfig:
        return self._config

    def cache(self, batch: LeftPadded, max_new_tokens: int) -> HuggingFaceCache:
        return HuggingFaceCache(batch)

    def forward(self, tokens: Int[Tensor, "B T"], cache: HuggingFaceCache) -> Float[Tensor, "B T V"]:
        """Float32 logits after each of `tokens`, which take the next slots of `cache`."""
        start, end = cache.used, cache.used + tokens.shape[1]
        if (beyond := end - cache.present.shape[1]) > 0:
            grown = cache.present.new_ones(len(tokens), beyond)
            cache.present = torch.cat([cache.present, grown], 1)
        present = cache.present[:, :end]
        output = self.model(
            input_ids=tokens,
            attention_mask=present,
            position_ids=(present.cumsum(1) - 1).clamp(min=0)[:, start:],
            past_key_values=cache.keys_and_values,
            use_cache=True,
        )
        cache.used = end
        return output.logits.float()


class HuggingFaceSteps:
    """The engine `hf`, stepped: stock transformers, float32 or bfloat16."""

    def __init__(self, config: ModelConfig, precision: str) -> None:
        from transformers import AutoModelForCausalLM

        from lab.host.rollout.served import model_family, model_shape
        from true_on_policy.contract.cpu import DTYPES
        from true_on_policy.models.tiny import config_of

        dtype = DTYPES[precision]
        shape = config_of(model_family(config), model_shape(config), dtype)
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa").eval()
        self._decoder, self.version = HuggingFaceDecoder(config, model), -1

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take copies of all parameters; the decoders of responses under way have them too.

        Raises:
            InputError: a name is missing or unknown, or a shape is wrong.
        """
        from true_on_policy.models.hf_decoder import stacked

        try:
            self._decoder.model.load_state_dict(stacked(weights, self._decoder.config.experts))
        except RuntimeError as error:
            raise InputError(f"update_weights: {error}") from error
        self.version = version

    def begin(self, responses: Sequence[Unfinished], sampling: Sampling) -> Decoding:
        """Begin a batch of responses, which the caller steps."""
        return Decoding(self.decoder, responses, sampling)

    @property
    def decoder(self) -> HuggingFaceDecoder:
        return self._decoder

    def close(self) -> None:
        """Do nothing: the engine has no process beside this one."""


STEPPED = {"local": DecodeEngine, "hf": HuggingFaceSteps}
"""Engines inside this process, by the name of `--rollout-engine`."""


def stepped(name: str, config: ModelConfig, precision: str, keep_cache: bool) -> SteppedEngine:
    """Make the engine `name`; `keep_cache` says what an update does to a cache that outlives responses."""
    if name in STEPPED:
        return STEPPED[name](config, precision)
    from lab.host.rollout.served_steps import ServedSteps

    return ServedSteps(name, config, precision, keep_cache)
