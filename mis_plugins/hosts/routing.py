"""The watch over routers inside a host: begun by a hook before each log-prob pass, read by the step hook.

The recorded routes that it compares with are queues of the host's beside each router, or Megatron-core's one target.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mis_plugins.config import reading
from mis_plugins.config.model import CorrectionConfig, RoutingConfig
from mis_plugins.correction.pipeline import Correction
from mis_plugins.errors import InputError, MisError, logger
from mis_plugins.hosts import checks, megatron, tracking
from mis_plugins.hosts.adapters.miles import NEEDS as MILES
from mis_plugins.hosts.adapters.slime import SLIME, STAGE
from mis_plugins.hosts.adapters.vime import VIME
from mis_plugins.hosts.host import ROUTES_HOOK
from mis_plugins.hosts.registry import current
from mis_plugins.packing.layout import Layout
from mis_plugins.packing.ragged import Ranks
from mis_plugins.routing.placement import Grid, response_rows
from mis_plugins.routing.report import Groups, Seen, metrics_of, read
from mis_plugins.routing.table import LOG_PROB, TRAIN, Flags, split
from mis_plugins.routing.watch import Source, Watch, in_backward

NOT_WATCHED = (
    "{reject}: statistic: route needs the routes of the trainer's log-prob pass, and none of these micro-batches was "
    f"watched; give {ROUTES_HOOK}, and let the trainer recompute log-probs (slime with one step a rollout: "
    "--get-mismatch-metrics beside --use-tis)"
)


class Watching:
    """The watch of this process, and the step that it was last read for."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.step: tuple[int, int] | None = None
        self.began = 0  # micro-batches of the rollout that had begun when the step did

    def before_log_probs(self, args: Any, model: Sequence[nn.Module], prefix: str) -> None:
        """Begin a log-prob pass; a pass of a reference model or a teacher is not watched."""
        watch = self._installed(args, model)
        watch.begin(LOG_PROB if prefix == "" else None)

    def before_step(self, args: Any, rollout_id: int, step_id: int, model: Sequence[nn.Module] | None) -> None:
        """Read what was seen since the last call, log it, and watch the forwards of the step that begins.

        Raises:
            MisError: `mis.routing.on_fault: raise` and a rank found a fault, or a rule reads routes that are not known;
                every rank raises.
        """
        if model is None or (self.watch is None and reading.from_args(args).routing is None):
            return
        watch, first = self._installed(args, model), self.step is None
        if self.step == (rollout_id, step_id):
            watch.rollout.trained = self.began  # the host repeats the step
        self.step, self.began = (rollout_id, step_id), watch.rollout.trained
        if not first or watch.run.part is not None:
            seen = read(watch, groups(args))
            self._say(args, seen, tracking.number_of(args, rollout_id, step_id))
        watch.begin(TRAIN)

    def _say(self, args: Any, seen: Seen, number: int) -> None:
        ranks = current(args).parallel()[0]
        reports = megatron.holds_log_probs() and current(args).reports(ranks)
        faults = [*seen.mine, *(seen.faults if seen.tells else ())]
        for fault in faults:
            logger.warning("routing replay, step %d: %s", number, fault)
        if reports and (metrics := metrics_of(seen)):
            tracking.log(args, metrics, number)
        _stop(args, seen)

    def _installed(self, args: Any, model: Sequence[nn.Module]) -> Watch:
        if self.watch is None:
            config = reading.from_args(args)
            checks.refuse("watch", args, config, current(args))
            asked = config.routing or RoutingConfig()
            watch = Watch(source(), _grid(args), asked.experts == "trainer", megatron.pipeline()[1])
            watch.install(model, args.num_layers)
            self.watch = watch
        return self.watch

    def flags(self, args: Any, layout: Layout, total_lengths: Sequence[int], device: torch.device) -> Flags | None:
        """Flags of each local response token of the micro-batch that is trained now; None where none are known."""
        flags = None if self.watch is None else self.watch.flags()
        if flags is None or getattr(args, "allgather_cp", False) or getattr(args, "qkv_format", "thd") != "thd":
            return None
        assert self.watch is not None
        rows = response_rows(layout, total_lengths, self.watch.grid, device)
        return Flags(flags.differs[rows], flags.kind[rows])

    def routes(self, args: Any, config: CorrectionConfig, flags: Flags | None) -> Float[Tensor, " T"] | None:
        """Layers that route each token otherwise, for `statistic: route`; None where no rule reads them.

        Raises:
            ConfigError: the host lets nothing watch its routers.
            InputError: a rule reads routes and no log-prob pass was watched, or `mis.routing` and nothing watches.
        """
        names = reading.spelling(args)
        if flags is None:
            checks.refuse("routes", args, config, current(args))
        if config.routing is not None and self.watch is None:
            raise InputError(f"{{routing}}: nothing watches the routers; give {ROUTES_HOOK}").spelled(names, "mis.")
        if not config.reads_routes:
            return None
        if flags is None:
            raise InputError(NOT_WATCHED).spelled(names, "mis.")
        return flags.differs.float()

    def record(self, correction: Correction, flags: Flags | None) -> None:
        """Add the log ratios of a micro-batch by class of token; nothing inside a backward's recompute."""
        if flags is not None and self.watch is not None and not in_backward():
            self.watch.sums.split += split(correction, flags.kind)


def _stop(args: Any, seen: Seen) -> None:
    """Raise on every rank alike where the config says so, or where a rule would keep tokens of unknown routes."""
    config = reading.from_args(args)
    faults = "; ".join((*seen.mine, *seen.faults))
    if seen.unknown and seen.compared and config.reads_routes:
        raise MisError(
            f"{{reject}}: statistic: route: the log-prob pass lacks {seen.unknown} comparisons of a router's choice "
            "with the engine's, and their tokens would count as routed alike; "
            f"{faults or 'see the logs of all ranks'}"
        ).spelled(reading.spelling(args), "mis.")
    if seen.faulty and config.routing is not None and config.routing.on_fault == "raise":
        raise MisError(f"mis.routing.on_fault: raise: {faults or f'another log names {seen.faulty} faults'}")


def _grid(args: Any) -> Grid:
    cp_size, cp_rank = current(args).parallel()[1]
    sp_size, sp_rank = megatron.tensor() if getattr(args, "sequence_parallel", False) else (1, 0)
    return Grid(cp_size, cp_rank, sp_size, sp_rank, bool(getattr(args, "allgather_cp", False)))


def groups(args: Any) -> Groups:
    """The ranks that hold other parts of a step."""
    ranks: Ranks = current(args).parallel()[0]
    cut = bool(getattr(args, "sequence_parallel", False))
    pipeline, _ = megatron.pipeline()
    return Groups(pipeline, None if cut else ranks.tp, ranks.tp if cut else None, ranks.cp, ranks.dp)


WATCHING = Watching()


# ---------------------------------------------------------------------------------------------------- recorded routes

FORWARD, BACKWARD, FALLTHROUGH = "replay_forward", "replay_backward", "fallthrough"
SWITCH = "ENABLE_ROUTING_REPLAY"


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
        return Queues(
            lambda: os.environ.get(STAGE) if os.environ.get(SWITCH, "0") == "1" else None,
            partial(os.environ.__setitem__, STAGE),
        )
    return Targets()
