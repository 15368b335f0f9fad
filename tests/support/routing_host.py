"""A stand-in for how Miles replays routes, around Megatron's own MoE layers: queues beside each router, and one stage.

Routers reach the queues through Megatron-core's `router_replay`, where the hosts patch the selection itself.
"""

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Int
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

HIDDEN, EXPERTS, TOPK, VOCABULARY = 16, 8, 2, 50


class Queue:
    """Recorded rows of one router, a tensor a micro-batch."""

    def __init__(self) -> None:
        self.top_indices_list: list[Tensor] = []
        self.forward_index = self.backward_index = 0


class Manager:
    """The stage that all routers are in."""

    enabled = True
    stage = "fallthrough"
    current: Queue | None = None


class Bridge:
    """Where Megatron-core asks for the selection of a router."""

    def __init__(self, manager: Manager, queue: Queue):
        self.manager, self.queue = manager, queue

    def get_replay_topk(self, scores: Tensor, topk: int, groups: Any, group_topk: Any, default: Any) -> Any:
        if self.manager.stage != "replay_forward":
            return default(scores, topk, num_groups=groups, group_topk=group_topk)
        rows = self.queue.top_indices_list[self.queue.forward_index].long()
        self.queue.forward_index += 1
        return scores.gather(1, rows), rows


class Stage(nn.Module):
    """MoE layers of one pipeline stage, each on the embeddings themselves, so that an oracle needs no other layer."""

    def __init__(self, layers: range, total: int, manager: Manager | None, **parallel: Any):
        super().__init__()
        config = TransformerConfig(
            num_layers=total, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS,
            moe_router_topk=TOPK, moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
            ffn_hidden_size=HIDDEN, moe_ffn_hidden_size=HIDDEN, add_bias_linear=False, use_cpu_initialization=True,
            params_dtype=torch.float32, gradient_accumulation_fusion=False, **parallel,
        )  # fmt: skip
        moe_utils.te_general_gemm = None  # megatron-core 0.16.1 forgets the name where Transformer Engine is absent
        mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=mlp)
        torch.manual_seed(0)
        self.embeddings = nn.Parameter(embeddings())
        self.layers = nn.ModuleList(
            MoELayer(config, MoESubmodules(experts=experts), layer_number=n + 1) for n in layers
        )
        for n, layer in zip(layers, self.layers, strict=True):
            router: Any = layer.router
            router.set_layer_number(n + 1)
            with torch.no_grad():
                router.weight.copy_(gates(n))
            if manager is not None:
                router.routing_replay = Queue()
                router.router_replay = Bridge(manager, router.routing_replay)

    def forward(self, input_ids: Tensor, packed_seq_params: Any, loss_mask: Tensor, sp: tuple[int, int]) -> Tensor:
        hidden = self.embeddings[input_ids[0]].unsqueeze(1).chunk(sp[0])[sp[1]]
        with patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
            return torch.stack([layer(hidden)[0].sum() for layer in self.layers]).sum()


def fuse(stage: Stage) -> None:
    """--moe-router-fusion: Transformer Engine's selection, of which plain torch does the part here."""
    moe_utils.HAVE_TE = True
    moe_utils.fused_topk_with_score_function = _fused
    for layer in stage.layers:
        layer.router.config.moe_router_fusion = True  # type: ignore[union-attr]


def _fused(logits: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    return moe_utils.topk_routing_with_score_function(logits, topk)


def embeddings() -> Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))


def gates(layer: int) -> Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(100 + layer))


def own_route(token: int, layer: int) -> list[int]:
    """The experts of a token by the gates alone, sorted in Python."""
    logits = (gates(layer).double() @ embeddings()[token].double()).tolist()
    return sorted(range(EXPERTS), key=lambda e: -logits[e])[:TOPK]


def engine_routes(tokens: list[int], layers: int, share: float, seed: int) -> Int[Tensor, "n L k"]:
    """Routes of an engine that agrees but for a share of (token, layer), of which one expert is another."""
    dice = random.Random(seed)
    rows = [[own_route(token, layer) for layer in range(layers)] for token in tokens]
    for row in rows:
        for route in row:
            if dice.random() < share:
                route[-1] = dice.choice([e for e in range(EXPERTS) if e not in route])
    return torch.tensor(rows, dtype=torch.int32)


def module(manager: Manager) -> SimpleNamespace:
    """What stands in `sys.modules` for the host's replay module."""
    return SimpleNamespace(routing_replay_manager=manager)
