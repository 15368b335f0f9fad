"""R3 in the embedded host: the trainer's routers take the engine's experts, by Megatron-core's own replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Int
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor, nn

from lab.host.train.batch import Layout
from mis_plugins.errors import InputError
from mis_plugins.hosts.routing import of_megatron
from mis_plugins.routing.watch import routers_of

ROUTES = "rollout_routed_experts"
"""Name of the engine's routes in a sample and in the rollout data, as in Miles and slime."""


class Replay:
    """The replay of all routers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._replays = [(one.layer, of_megatron(one.router)) for one in routers_of([model])]

    @contextmanager
    def of(self, layout: Layout, routes: Sequence[Int[Tensor, "_ L K"]] | None) -> Iterator[None]:
        """Have the routers take these routes in a forward of the block; without routes, those of their own gates."""
        if routes is None:
            yield
            return
        rows = rows_of(layout, routes)
        for layer, replay in self._replays:
            replay.set_target_indices(rows[:, layer])
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for _, replay in self._replays:
                replay.clear_router_replay_action()
                replay.clear_indices()


def rows_of(layout: Layout, routes: Sequence[Int[Tensor, "_ L K"]]) -> Int[Tensor, "S L K"]:
    """The routes of this rank's slots; last tokens and padding have none, and get the first experts.

    Raises:
        InputError: a sample has another number of routes than tokens before its last.
    """
    for sample, (one, total) in enumerate(zip(routes, layout.total_lengths, strict=True)):
        if len(one) != total - 1:
            raise InputError(
                f"{ROUTES} of sample {sample}: {len(one)} rows for {total} tokens; the engine routes all but the last"
            )
    flat, topk = torch.cat(list(routes)).long(), routes[0].shape[-1]
    before = torch.tensor([sum(map(len, routes[:n])) for n in range(len(routes))])
    inside = layout.positions < torch.tensor(layout.total_lengths)[layout.sequence] - 1
    place = torch.where(inside, before[layout.sequence] + layout.positions, 0)
    return torch.where(inside[:, None, None], flat[place], torch.arange(topk))
