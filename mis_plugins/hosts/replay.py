"""The recorded routes of each host: queues beside each router, or Megatron-core's one target."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from mis_plugins.hosts.needs.miles import NEEDS as MILES
from mis_plugins.hosts.needs.slime import SLIME, VIME
from mis_plugins.routing.watch import Source, Tensor

FORWARD, BACKWARD, FALLTHROUGH = "replay_forward", "replay_backward", "fallthrough"
SWITCH, STAGE = "ENABLE_ROUTING_REPLAY", "ROUTING_REPLAY_STAGE"


@dataclass(frozen=True)
class Queues:
    """Queues of Miles, slime or vime: `router.routing_replay`, read in a forward and again in a backward's recompute.

    stage: reads what the host has routers do now; None where replay is off.
    say: sets the stage.
    """

    stage: Callable[[], str | None]
    say: Callable[[str], None]

    def replaying(self) -> bool:
        return self.stage() in (FORWARD, BACKWARD)

    def has_queue(self, router: Any) -> bool:
        return getattr(router, "routing_replay", None) is not None

    def recorded(self, router: Any) -> int:
        return len(router.routing_replay.top_indices_list)

    def consumed(self, router: Any) -> int | None:
        return getattr(router.routing_replay, self._index) if self.has_queue(router) else None

    def rows(self, router: Any) -> Tensor | None:
        at = self.consumed(router)
        if at is None or at >= self.recorded(router):
            return None
        rows = router.routing_replay.top_indices_list[at]
        return rows if hasattr(rows, "shape") else None  # slime may read them from a file when they are consumed

    @contextmanager
    def passing_over(self, router: Any) -> Iterator[None]:
        stage, queue, index = self.stage(), router.routing_replay, self._index
        assert stage is not None
        self.say(FALLTHROUGH)
        try:
            yield
        finally:
            self.say(stage)
            setattr(queue, index, getattr(queue, index) + 1)

    @property
    def _index(self) -> str:
        return "forward_index" if self.stage() == FORWARD else "backward_index"


@dataclass(frozen=True)
class Targets:
    """Megatron-core's own replay: `router.router_replay` holds the rows of one micro-batch."""

    def replaying(self) -> bool:
        replay = sys.modules.get("megatron.core.transformer.moe.router_replay")
        instances = () if replay is None else replay.RouterReplay.global_router_replay_instances
        return any(getattr(each.router_replay_action, "value", None) == FORWARD for each in instances)

    def has_queue(self, router: Any) -> bool:
        return of_megatron(router) is not None

    def recorded(self, router: Any) -> int:
        return int(of_megatron(router).target_topk_idx is not None)

    def consumed(self, router: Any) -> int | None:
        return None

    def rows(self, router: Any) -> Tensor | None:
        return of_megatron(router).target_topk_idx if self.has_queue(router) else None

    @contextmanager
    def passing_over(self, router: Any) -> Iterator[None]:
        replay = of_megatron(router)
        action, replay.router_replay_action = replay.router_replay_action, None
        try:
            yield
        finally:
            replay.router_replay_action = action


def of_megatron(router: Any) -> Any:
    """Megatron-core's own replay of a router, behind what `true_on_policy` may have put before it; None without one."""
    return getattr(router.router_replay, "replay", router.router_replay)


def source() -> Source:
    """The queues of the host that runs in this process; Megatron-core's where it has none."""
    if (manager := MILES.routing_replay.loaded()) is not None:
        return Queues(lambda: manager.stage if manager.enabled else None, partial(setattr, manager, "stage"))
    if any(host.routing_replay.loaded() is not None for host in (SLIME, VIME)):
        return Queues(_slime_stage, partial(os.environ.__setitem__, STAGE))
    return Targets()


def _slime_stage() -> str | None:
    return os.environ.get(STAGE) if os.environ.get(SWITCH, "0") == "1" else None
