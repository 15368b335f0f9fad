"""The trainer of a real model in bf16 with float32 master weights, and the two ways to sample.

`decoded` samples with a key-value cache, as an engine does; `on_policy` samples by the trainer's own pass over the
same shape, so that its log-probs are the trainer's to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lab.host.rollout.sampler import derive_seed
from lab.ladder.rungs import Rounding, rounded
from true_on_policy.models import hf_decoder
from true_on_policy.models.tiny import read_weights

CLIP = 1.0  # of the gradient's norm
BETAS = (0.9, 0.95)
NAMED = 32  # likeliest tokens that a sampler names at each place


@dataclass(frozen=True)
class Batch:
    """Responses that were sampled together, and that are scored together.

    Attributes:
        prompts: `[B, P]` token ids.
        tokens: `[B, T]` sampled token ids; what follows the first end token is no part of a response.
        lengths: `[B]` tokens of each response, its end token included.
        behavior: `[B, T]` log-probs of the tokens by the code that sampled them.
        named: `[B, T, K]` ids of the tokens that this code found likeliest; `named_log_probs` are their log-probs.
    """

    prompts: Tensor
    tokens: Tensor
    lengths: Tensor
    behavior: Tensor
    named: Tensor
    named_log_probs: Tensor

    @property
    def valid(self) -> Tensor:
        """`[B, T]`: whether a token belongs to its response."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]

    def split(self, rows: int) -> list[Batch]:
        """Parts of so many responses."""
        values = (getattr(self, field.name) for field in fields(self))
        return [Batch(*parts) for parts in zip(*(one.split(rows) for one in values), strict=True)]

    def responses(self) -> list[list[int]]:
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]


class Trainer:
    """A decoder in bf16 that AdamW moves through its float32 master weights."""

    def __init__(self, checkpoint: Path, lr: float):
        self.model = hf_decoder.load(checkpoint, "bf16")
        weights = read_weights(checkpoint)
        self.parameters = dict(self.model.named_parameters())
        self.master = {name: torch.nn.Parameter(weights[name].float()) for name in self.parameters}
        self.optimizer = torch.optim.AdamW(self.master.values(), lr, BETAS, weight_decay=0.0)

    def log_probs(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """`[B, T]` float32 log-probs of the tokens after their prompts, in one causal pass."""
        return log_probs_of(self.logits(prompts, tokens), tokens)

    def distribution(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """`[B, T, V]`; the pass has the same shape however many of the tokens are known."""
        return self.logits(prompts, tokens)[:, :-1].log_softmax(-1)

    def logits(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """`[B, T + 1, V]` float32 logits, from those that score the first token of a response."""
        whole = torch.cat([prompts, tokens], 1)
        return self.model(input_ids=whole, use_cache=False, logits_to_keep=tokens.shape[1] + 1).logits.float()

    def collect(self) -> None:
        """Move the gradients of a micro-batch to the float32 sum."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            total, gradient = self.master[name].grad, parameter.grad.float()
            self.master[name].grad = gradient if total is None else total.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> float:
        """Clip the summed gradient, step, round the weights to bf16, and return the norm before the clip."""
        norm = torch.nn.utils.clip_grad_norm_(self.master.values(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
        return float(norm)

    @torch.no_grad()
    def hand_over(self, model: Any, rounding: Rounding) -> None:
        """Give the model of a rollout engine the weights, its linear layers rounded as a rung rounds them."""
        for name, parameter in model.named_parameters():
            parameter.copy_(rounded(name, self.master[name].detach(), rounding))


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """`[B, T]` log-probs of the tokens by the logits of `Trainer.logits`."""
    return logits[:, :-1].log_softmax(-1).gather(2, tokens[..., None])[..., 0]


Choose = Callable[[Tensor, int], Tensor]
"""Chooses `[B]` tokens from their `[B, V]` log-probs and from their place in the response."""


def drawing(seeds: Sequence[int]) -> Choose:
    """Draw by an exponential race: of waiting times `E_k / p_k`, the shortest wins. A seed fixes its response's `E_k`.

    Two samplers with equal seeds choose different tokens with a probability of at most twice their total variation.
    """

    def choose(log_probs: Tensor, place: int) -> Tensor:
        waits = torch.stack([_numbers(seed, place, log_probs.shape[1]) for seed in seeds]).log_().neg_()
        return (waits / log_probs.double().exp()).argmin(1)

    return choose


def _numbers(seed: int, place: int, count: int) -> Tensor:
    """`[count]` uniform float64 numbers for a place of a response."""
    generator = torch.Generator().manual_seed(derive_seed(seed, place))
    return torch.rand(count, dtype=torch.float64, generator=generator)


@torch.no_grad()
def decoded(model: Any, prompts: Tensor, seeds: Sequence[int], length: int, end: int) -> Batch:
    """Sample with a key-value cache, a token at a time; the batch is as wide as its longest response."""
    sampled = _with_cache(model, prompts, drawing(seeds), length, end)
    found, wide = sampled.batch(), slice(sampled.place)
    cut = ("tokens", "behavior", "named", "named_log_probs")
    return replace(found, **{name: getattr(found, name)[:, wide] for name in cut})


@torch.no_grad()
def on_policy(trainer: Trainer, prompts: Tensor, seeds: Sequence[int], length: int, end: int) -> Batch:
    """Sample by the trainer's own pass over the whole shape; the batch keeps that shape.

    The cache drafts, and the pass draws again with equal numbers. Where its token is another, the pass is
    right and the rest of that response is drafted anew, until the pass draws every token of the draft.
    """
    choose = drawing(seeds)
    draft = _with_cache(trainer.model, prompts, choose, length, end).tokens
    while True:
        own, log_probs = _Sampled(prompts, length, end), trainer.distribution(prompts, draft)
        while not own.full:
            own.take(log_probs[:, own.place], choose)
        differs = own.tokens != draft
        again = differs.any(1).nonzero()[:, 0]
        if not len(again):
            return own.batch()
        known = differs[again].int().argmax(1) + 1
        rest = _after(drawing([seeds[row] for row in again.tolist()]), own.tokens[again], known)
        draft[again] = _with_cache(trainer.model, prompts[again], rest, length, end).tokens


def _with_cache(model: Any, prompts: Tensor, choose: Choose, length: int, end: int) -> _Sampled:
    cache, fed = DynamicCache(), prompts
    sampled = _Sampled(prompts, length, end)
    while not sampled.full:
        made = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        fed = sampled.take(made.logits[:, -1].float().log_softmax(-1), choose)[:, None]
    return sampled


def _after(choose: Choose, tokens: Tensor, known: Tensor) -> Choose:
    """Choose the first `known` of `[B, T]` tokens, and what follows as `choose` does."""
    return lambda log_probs, place: torch.where(place < known, tokens[:, place], choose(log_probs, place))


class _Sampled:
    """Responses while they are sampled."""

    def __init__(self, prompts: Tensor, length: int, end: int):
        rows = len(prompts)
        self.prompts, self.end, self.place = prompts, end, 0
        self.tokens = torch.full((rows, length), end)
        self.behavior = torch.zeros(rows, length)
        self.named = torch.zeros(rows, length, NAMED, dtype=torch.long)
        self.named_log_probs = torch.zeros(rows, length, NAMED)
        self._open = torch.ones(rows, dtype=torch.bool)
        self._lengths = torch.zeros(rows, dtype=torch.long)

    @property
    def full(self) -> bool:
        """Whether all responses ended, or no place is left."""
        return self.place == self.tokens.shape[1] or not bool(self._open.any())

    def take(self, log_probs: Tensor, choose: Choose) -> Tensor:
        """Choose the next token of each response; one that has ended is followed by end tokens."""
        drawn = choose(log_probs, self.place)
        token = torch.where(self._open, drawn, self.end)
        self.tokens[:, self.place] = token
        self.behavior[:, self.place] = log_probs.gather(1, token[:, None])[:, 0]
        self.named_log_probs[:, self.place], self.named[:, self.place] = log_probs.topk(NAMED)
        self._lengths += self._open
        self._open = self._open & (token != self.end)
        self.place += 1
        return token

    def batch(self) -> Batch:
        return Batch(self.prompts, self.tokens, self._lengths, self.behavior, self.named, self.named_log_probs)
