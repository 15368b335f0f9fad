"""Megatron-core's mixture of experts, which rounds and adds in the contract's order.

Layer, router, experts and dispatcher are Megatron's; ours are the combine weights that the router makes of
its logits, and the dispatcher's sum over experts. Without Transformer Engine, megatron-core 0.16.1 lacks the
name `te_general_gemm` that its gate reads, so this module sets the name. The dispatcher is the all-gather
one, which runs without CUDA streams.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from true_on_policy.contract.rounding import combined, total

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # pyright: ignore[reportAttributeAccessIssue]

# Arguments of a config under which Megatron's layer of experts runs on a CPU, stock or in the agreed order.
RUNS_HERE: dict[str, Any] = {
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
}


def in_order(mlp: ModuleSpec, divided: bool) -> ModuleSpec:
    """Return the spec of Megatron's layer of experts with the agreed router and dispatcher.

    A shared expert, which every token takes, stays Megatron's own. `divided` divides a token's scores by their sum.
    """
    stock: Any = mlp.submodules
    router = SpecRouter if divided else SpecScoresRouter
    submodules = MoESubmodules(experts=stock.experts, router=router, shared_experts=stock.shared_experts)
    return ModuleSpec(SpecExpertsLayer, submodules=submodules, metainfo=mlp.metainfo)


class Choice:
    """A `router_replay` that notes the order of a router's choice, which Megatron's dense map does not hold.

    Megatron asks a router's `router_replay` for the choice. If the router had a replay of Megatron's own,
    `Choice` asks that replay in turn.
    """

    experts: Int64[Tensor, "T K"]

    def __init__(self, replay: RouterReplay | None):
        self.replay = replay

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int | None, group_topk: int | None, compute: Callable
    ) -> tuple[Tensor, Tensor]:
        choose = compute if self.replay is None else self.replay.get_replay_topk
        more = () if self.replay is None else (compute,)
        values, self.experts = choose(scores, topk, groups, group_topk, *more)
        return values, self.experts


class SpecRouter(TopKRouter):
    """Megatron's router with scores in float32; the combine weights are the scores divided by their sum."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        assert self.config.moe_router_pre_softmax and self.config.moe_router_dtype is None
        self.router_replay: Any = Choice(self.router_replay)

    def routing(
        self, logits: Float[Tensor, "S B E"], padding_mask: Tensor | None = None
    ) -> tuple[Float32[Tensor, "T E"], Bool[Tensor, "T E"]]:
        scores, routing_map = super().routing(logits.float(), padding_mask)
        return self.weights(scores), routing_map

    def weights(self, scores: Float32[Tensor, "T E"]) -> Float32[Tensor, "T E"]:
        """The combine weights of all experts, 0 where a token did not choose the expert."""
        return scores / total(scores.gather(1, self.router_replay.experts))


class SpecScoresRouter(SpecRouter):
    """Megatron's router with scores in float32; the combine weights are the undivided scores."""

    def weights(self, scores: Float32[Tensor, "T E"]) -> Float32[Tensor, "T E"]:
        return scores


class SpecDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's dispatcher on one rank, which weights and adds the experts' outputs in the order of the choice."""

    def __init__(self, *args: Any, router: SpecRouter, **options: Any):
        super().__init__(*args, **options)
        assert self.tp_size == self.ep_size == 1, "a sum over ranks would add in another order"
        self._router = router

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give the experts weights of one, because the agreed order applies the weights after the experts."""
        received, counts, weights = super().dispatch_postprocess(hidden_states, probs)
        return received, counts, torch.ones_like(weights)

    def combine_preprocess(self, hidden_states: Float[Tensor, "N H"]) -> Float[Tensor, "T H"]:
        by_expert = self.local_map.T
        rows = (by_expert.flatten().cumsum(0) - 1).view_as(by_expert).T
        rows = rows.gather(1, self._router.router_replay.experts)
        return combined(hidden_states, rows, self.local_probs[rows])


class SpecExpertsLayer(MoELayer):
    """Megatron's layer of experts with the agreed dispatcher."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        stock, router = self.token_dispatcher, self.router
        assert isinstance(stock, MoEAllGatherTokenDispatcher) and isinstance(router, SpecRouter)
        self.token_dispatcher = SpecDispatcher(
            stock.num_local_experts,
            stock.local_expert_indices,
            config=self.config,
            pg_collection=options.get("pg_collection") or moe_utils.get_default_pg_collection(),
            router=router,
        )
