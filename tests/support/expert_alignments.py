"""A layer of experts of Megatron-core in bf16, with one alignment of the contract left out, against SGLang's formula.

The hidden states and weights are random, the kernels those of the CPU contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import chosen, combined, total
from true_on_policy.kernels.pin import pinned
from true_on_policy.trainers import experts, megatron
from true_on_policy.trainers.experts import Choice, SpecDispatcher, SpecRouter

SIZES = ((8, 2), (64, 8), (128, 8))
HIDDEN, WIDTH, TOKENS = 128, 32, 1024


@dataclass(frozen=True)
class Case:
    """A case is a layer of experts of Megatron, and the hidden states that it receives."""

    layer: Any
    hidden: Tensor
    top_k: int

    @classmethod
    def random(cls, count: int, top_k: int, tokens: int, replay: bool = False) -> Case:
        """Build a layer of `count` experts in the agreed order, with random weights."""
        generator = torch.Generator().manual_seed(0)
        layer = _layer(count, top_k, replay)
        for weight in layer.parameters():
            drawn = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
            weight.data = drawn.bfloat16()
        hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        return cls(layer, hidden, top_k)

    def output(self) -> Tensor:
        """Compute the outputs by Megatron's layer."""
        with megatron._rope_on_cpu():
            return self.layer(self.hidden[:, None])[0][:, 0]

    def expected(self) -> Tensor:
        """Compute the outputs by SGLang's formula, one expert after the other."""
        weights, ids = chosen(F.linear(self.hidden, self.layer.router.weight), self.top_k)
        outputs, rows = [], torch.empty_like(ids)
        for index, expert in enumerate(self.layer.experts.local_experts):
            tokens, slots = torch.where(ids == index)
            rows[tokens, slots] = torch.arange(len(tokens)) + sum(map(len, outputs))
            gate, up = F.linear(self.hidden[tokens], expert.linear_fc1.weight).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, expert.linear_fc2.weight))
        return combined(torch.cat(outputs), rows, weights)

    @torch.no_grad()
    def equal(self) -> int:
        """Count the tokens whose outputs have the bits of the formula."""
        same = self.output().view(torch.int16) == self.expected().view(torch.int16)
        return int(same.all(-1).sum())


def _layer(count: int, top_k: int, replay: bool) -> Any:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=count,
        num_experts_per_tok=top_k,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
        norm_topk_prob=True,
    )
    megatron.one_rank()
    build = megatron._transformer_config

    def with_replay(*arguments: Any) -> Any:
        made = build(*arguments)
        made.moe_enable_routing_replay = replay
        return made

    with patch.object(megatron, "_transformer_config", with_replay):
        order = megatron.NormOrder(rounds_sum=False, rounds_normalized=False)
        model: Any = megatron._build(config, torch.bfloat16, order, None)
    return model.decoder.layers[0].mlp


def _gate_in_fp32(router: SpecRouter, hidden: Tensor) -> Tensor:
    return F.linear(hidden.float(), router.weight.float())


def _softmax_of_the_chosen(router: SpecRouter, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
    router.config.moe_router_pre_softmax = False
    try:
        return super(SpecRouter, router).routing(logits.float(), padding_mask)
    finally:
        router.config.moe_router_pre_softmax = True


def _lowest_first(
    choice: Choice, scores: Tensor, top_k: int, groups: int | None, group_topk: int | None, compute: Callable
) -> tuple[Tensor, Tensor]:
    values, order = scores.sort(dim=1, descending=True, stable=True)
    choice.experts = order[:, :top_k]
    return values[:, :top_k], choice.experts


def _rounded_weight(router: SpecRouter, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
    scores, routing_map = super(SpecRouter, router).routing(logits.float(), padding_mask)
    weights = scores / total(scores.gather(1, router.router_replay.experts))
    return weights.to(logits.dtype).float(), routing_map


@contextmanager
def _weight_before_the_second_product() -> Iterator[None]:
    """Give the experts their weights, as Megatron's dispatcher does, and combine with weights of one."""

    def unweighted(outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        return combined(outputs, rows, torch.ones_like(weights))

    stock = experts.MoEAllGatherTokenDispatcher.dispatch_postprocess
    with patch.object(SpecDispatcher, "dispatch_postprocess", stock), patch.object(experts, "combined", unweighted):
        yield


def _in_order_of_experts(outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    order = rows.argsort(1)
    return combined(outputs, rows.gather(1, order), weights.gather(1, order))


def _rounded_at_each_expert(outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    summed = torch.zeros(len(rows), outputs.shape[1], dtype=outputs.dtype)
    for slot in range(rows.shape[1]):
        summed += (outputs[rows[:, slot]].float() * weights[:, slot, None]).to(outputs.dtype)
    return summed


Change = Callable[[], AbstractContextManager]

COMPLETE = "nothing"
# What is left out, each with its row of the contract and the change that leaves the row out.
LEFT_OUT: dict[str, tuple[str, Change]] = {
    "the gate's product is in fp32": ("gate", lambda: patch.object(SpecRouter, "gating", _gate_in_fp32)),
    "softmax over the chosen logits": ("scores", lambda: patch.object(SpecRouter, "routing", _softmax_of_the_chosen)),
    "ties go to the lowest index": ("ties", lambda: patch.object(Choice, "get_replay_topk", _lowest_first)),
    "the weight is rounded to bf16": ("combine weight", lambda: patch.object(SpecRouter, "routing", _rounded_weight)),
    "the weight multiplies before the second product": (
        "where the weight multiplies",
        _weight_before_the_second_product,
    ),
    "the sum is in the order of experts": (
        "sum over experts",
        lambda: patch.object(experts, "combined", _in_order_of_experts),
    ),
    "the sum is rounded at each expert": (
        "sum over experts",
        lambda: patch.object(experts, "combined", _rounded_at_each_expert),
    ),
}


def counts(case: Case) -> dict[str, int]:
    """Count the tokens with the agreed bits, by what is left out."""
    changes = {COMPLETE: nullcontext} | {what: change for what, (_, change) in LEFT_OUT.items()}
    found = {}
    for what, change in changes.items():
        with pinned(Contract(dtype="bf16")), change():
            found[what] = case.equal()
    return found
