"""Hugging Face transformers as a rollout engine: prefill in chunks, then decode from a key-value cache, in one batch.

The engine runs in this process on the kernels that are pinned when it is called, and needs no separate environment.
Prompts are padded on the left, so that one batch holds sequences that begin at different slots of the cache.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from transformers import DynamicCache

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.sides import ENGINES
from true_on_policy.contract.specs import NormOrder
from true_on_policy.engines.protocol import EngineError, Request, Sample
from true_on_policy.kernels.row_parallel import Tree, agreed_tree
from true_on_policy.models import hf_decoder
from true_on_policy.models.hf_decoder import padded, take

PREFILL_CHUNK = 128


def start(checkpoint: Path, contract: Contract, order: NormOrder | None) -> "HuggingFace":
    """Start the engine of a proof; without an `order` the engine is stock."""
    return HuggingFace(checkpoint, contract.dtype, order, order and agreed_tree(contract))


class HuggingFace:
    """A decoder of transformers as an engine; without an `order` and a `tree` the model is Hugging Face's own."""

    name = "hf"

    def __init__(self, checkpoint: Path, dtype: str, order: NormOrder | None = None, tree: Tree | None = None):
        self._model = hf_decoder.load(checkpoint, dtype, order, tree)
        self._version = 0

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ENGINES[self.name].packages}

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        decoding = _Decoding(self._model, [request.prompt for request in requests])
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        temperatures = torch.tensor([request.temperature for request in requests])[:, None]
        tokens, log_probs = [], []
        for _ in range(max(request.length for request in requests)):
            distribution = torch.log_softmax(decoding.logits / temperatures, -1)
            if distribution.isnan().any():
                raise EngineError("hf: the model gives NaN for log-probs; are all weights of its checkpoint finite?")
            pairs = zip(distribution.exp(), generators, strict=True)  # each row has its own random numbers
            tokens.append(torch.stack([torch.multinomial(row, 1, generator=own) for row, own in pairs]))
            log_probs.append(distribution.gather(1, tokens[-1])[:, 0])
            decoding.append(tokens[-1])
        drawn, measured = torch.cat(tokens, 1), torch.stack(log_probs, 1)
        rows = zip(requests, drawn.tolist(), measured, strict=True)
        return [self._sample(request, row, values) for request, row, values in rows]

    def _sample(self, request: Request, drawn: list[int], log_probs: Float32[Tensor, "N"]) -> Sample:
        """Cut the tokens drawn for one request after its end token, or at its length."""
        length = drawn.index(request.end) + 1 if request.end in drawn[: request.length] else request.length
        return Sample(request, tuple(drawn[:length]), log_probs[:length], self._version)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Float32[Tensor, "_"]]:
        tokens, present = padded([sample.sequence for sample in samples], "left")
        logits = self._model(
            input_ids=tokens, attention_mask=present, position_ids=_positions(present), use_cache=False
        ).logits.float()
        predicted = torch.log_softmax(logits[:, :-1], -1).gather(2, tokens[:, 1:, None])[..., 0]
        return [row[-len(sample.tokens) :] for row, sample in zip(predicted, samples, strict=True)]

    def update_weights(self, checkpoint: Path, version: int, keep_cache: bool = False) -> None:
        """Load a checkpoint's weights; `keep_cache` has no effect, because no cache outlives a call."""
        take(self._model, checkpoint)
        self._version = version

    def close(self) -> None:
        """Do nothing: the engine has no process beside this one."""


class _Decoding:
    """A batch between two steps of decode: its cache, its occupied slots, and the float32 logits of its next tokens."""

    logits: Float[Tensor, "B V"]

    def __init__(self, model: torch.nn.Module, prompts: Sequence[Sequence[int]]):
        tokens, self._present = padded(prompts, "left")
        self._model = model
        self._cache = DynamicCache()
        for start in range(0, tokens.shape[1], PREFILL_CHUNK):
            self._forward(tokens[:, start : start + PREFILL_CHUNK], start)

    def append(self, tokens: Int64[Tensor, "B 1"]) -> None:
        start = self._present.shape[1]
        self._present = torch.cat([self._present, torch.ones_like(tokens)], 1)
        self._forward(tokens, start)

    def _forward(self, tokens: Int64[Tensor, "B Q"], start: int) -> None:
        end = start + tokens.shape[1]
        present = self._present[:, :end]
        output = self._model(
            input_ids=tokens,
            attention_mask=present,
            position_ids=_positions(present)[:, start:],
            past_key_values=self._cache,
            use_cache=True,
        )
        self.logits = output.logits[:, -1].float()


def _positions(present: Int64[Tensor, "B T"]) -> Int64[Tensor, "B T"]:
    return (present.cumsum(1) - 1).clamp(min=0)
