"""The watch over the routers of one process: what each was told, what it did, and what it would have done alone.

Routers are wrapped where they run. Nothing in a forward waits for the device or for another rank: sums stay on the
device until the step hook reduces them (`routing/report.py`).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mis_plugins.routing.choice import compare, selection_scores, strange_at_random
from mis_plugins.routing.placement import BUCKETS, Grid, placement
from mis_plugins.routing.table import CLASSES, KINDS, LOG_PROB, SPLIT, TRAIN, Fault, Flags, Gathered, Kind, Passed, Ran

MTP = re.compile(r"(^|\.)mtp(\.|$)")


@runtime_checkable
class Source(Protocol):
    """The queues of recorded routes of one host; `mis_plugins/hosts/routing.py` has one for each host."""

    def replaying(self) -> bool:
        """Whether routers should consume recorded rows now."""
        ...

    def has_queue(self, router: Any) -> bool:
        """Whether recorded rows are kept for this router at all."""
        ...

    def recorded(self, router: Any) -> int:
        """How many micro-batches are recorded for this router."""
        ...

    def consumed(self, router: Any) -> int | None:
        """How many of them it has consumed; None where the host does not count them."""
        ...

    def rows(self, router: Any) -> Tensor | None:
        """The rows that this router should consume next, on any device; None where there are none."""
        ...

    def passing_over(self, router: Any) -> AbstractContextManager[None]:
        """Let the router route by its own gates within the block, and count its next rows as consumed."""
        ...


@dataclass(frozen=True)
class Watched:
    """One router. layer: index among all layers of the model; chunk: index among this rank's model chunks."""

    router: Any
    layer: int
    chunk: int

    @property
    def random(self) -> float:
        return strange_at_random(self.router.config.num_moe_experts, self.router.topk)


def routers_of(model: Sequence[nn.Module]) -> Iterator[Watched]:
    """Megatron's routers in the chunks of a model, less multi-token prediction's, which no host replays."""
    for chunk, part in enumerate(model):
        for name, module in part.named_modules():
            routes = all(hasattr(module, each) for each in ("routing", "topk", "score_function"))
            if routes and not MTP.search(name) and not getattr(module, "is_mtp_layer", False):
                yield Watched(module, module.layer_number - 1, chunk)  # type: ignore[operator]


def in_backward() -> bool:
    """Whether a backward runs: a forward within it is a recompute, whose first run was counted."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Pass:
    """The pass of the model that runs now.

    part: `LOG_PROB` or `TRAIN`; None where nothing shall watch, as in the pass of a reference model.
    first: the number of micro-batches in `Sums.ran` from before.
    batches: the number of micro-batches that each model chunk began.
    calls: how often the router of each layer ran.
    current: the micro-batch that runs now.
    replayed: whether a router should have consumed recorded rows.
    compared: how often a router compared its choice.
    """

    part: str | None = None
    first: int = 0
    batches: Counter[int] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    current: Passed | None = None
    replayed: bool = False
    compared: int = 0


@dataclass
class Rollout:
    """The log-prob pass of the rollout in training, and how far training has come.

    passed: its micro-batches, until they are gathered.
    gathered: its flags; None where no log-prob pass was watched.
    trained: the number of micro-batches that training forwards of the last chunk began.
    begun: the micro-batch that a training forward of the last chunk began last.
    unknown: how often a router ran in the log-prob pass, or should have run, and compared nothing.
    """

    passed: list[Passed] = field(default_factory=list)
    gathered: Gathered | None = None
    trained: int = 0
    begun: Passed | None = None
    unknown: int = 0


@dataclass
class Sums:
    """What was counted since the step hook last read: by layer and position, by class of token, by sample."""

    table: Float[Tensor, "L K P"]
    split: Float[Tensor, "C R"]
    ran: list[Ran] = field(default_factory=list)
    faults: dict[tuple[Kind, int], Fault] = field(default_factory=dict)

    @classmethod
    def empty(cls, layers: int, device: torch.device | None = None) -> "Sums":
        shapes = (layers, len(KINDS), BUCKETS), (len(CLASSES), len(SPLIT))
        table, split = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes)
        return cls(table, split)

    def cleared(self) -> "Sums":
        """Sums of as many layers, on the device, in which nothing was counted."""
        return Sums.empty(self.table.shape[0], self.table.device)


@dataclass
class Watch:
    """What one process saw of its routers.

    own: whether routers route by their own gates, and recorded rows are only compared.
    chunks: the number of model chunks on this rank.
    """

    source: Source
    grid: Grid
    own: bool = False
    stage: int = 0
    watched: Sequence[Watched] = ()
    chunks: int = 1
    run: Pass = field(default_factory=Pass)
    rollout: Rollout = field(default_factory=Rollout)
    sums: Sums = field(default_factory=lambda: Sums.empty(0))

    def install(self, model: Sequence[nn.Module], layers: int) -> None:
        """Wrap every router of the model, and hear when each chunk begins a micro-batch."""
        self.watched, self.chunks = tuple(routers_of(model)), len(model)
        for watched in self.watched:
            watched.router.routing = self._wrapped(watched, watched.router.routing)
        for chunk, part in enumerate(model):
            part.register_forward_pre_hook(self._begins(chunk), with_kwargs=True)
        device = next((p.device for part in model for p in part.parameters()), None)
        self.sums = Sums.empty(layers, device)

    def begin(self, part: str | None) -> None:
        """Begin a pass. A log-prob pass drops what an earlier one told of single tokens."""
        self.end()
        if part == LOG_PROB:
            self.rollout = Rollout()
            # Without a step hook nobody reads earlier log-prob passes, and they would pile up.
            self.sums.ran = [batch for batch in self.sums.ran if batch.part == TRAIN]
        self.run = Pass(part, first=len(self.sums.ran))

    def end(self) -> None:
        """End a pass, and note routers that did not run in every micro-batch of their chunk."""
        run = self.run
        for watched in self.watched:
            batches, calls = run.batches[watched.chunk], run.calls[watched.layer]
            if run.replayed and calls != batches:
                self.note("calls", watched, 0, f"{calls} of {batches}")
        if run.part == LOG_PROB:
            self.rollout.unknown = sum(run.batches[router.chunk] for router in self.watched) - run.compared
        self.run = Pass()

    def note(self, kind: Kind, watched: Watched, batch: int, ran: str = "") -> None:
        """Keep the first fault of each kind and layer."""
        fault = Fault(kind, watched.layer, self.stage, batch, ran)
        self.sums.faults.setdefault((kind, watched.layer), fault)

    def flags(self) -> Flags | None:
        """Flags of the micro-batch whose loss is computed now; None where no log-prob pass told them.

        Where the log-prob pass cut its micro-batches otherwise than training, the flags do not fit and are None.
        """
        gathered, trained, begun = self.rollout.gathered, self.rollout.trained, self.rollout.begun
        if gathered is None or begun is None or not 0 < trained <= len(gathered.flags):
            return None
        flags = gathered.flags[trained - 1]
        return flags if flags.differs.shape == begun.placed.position.shape else None

    def _begins(self, chunk: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            loss_mask = kwargs.get("loss_mask")
            if self.run.part is None or loss_mask is None:
                self.run.current = None
                return
            packed = kwargs.get("packed_seq_params")
            placed = placement(loss_mask, None if packed is None else packed.cu_seqlens_q, self.grid)
            self._enter(chunk, Passed.begin(placed, self.sums.table.shape[0]))

        return hook

    def _enter(self, chunk: int, begun: Passed) -> None:
        """Begin a micro-batch; chunks of one rank add to the same sums."""
        run, ran, number = self.run, self.sums.ran, self.run.batches[chunk]
        assert run.part is not None
        run.batches[chunk] += 1
        if run.first + number == len(ran):
            ran.append(Ran(run.part, number, begun.samples))
        begun = replace(begun, samples=ran[run.first + number].samples)
        if run.part == TRAIN:
            run.current = begun
            if chunk == self.chunks - 1:  # the loss follows the last chunk; earlier chunks run ahead
                self.rollout.trained, self.rollout.begun = self.rollout.trained + 1, begun
            return
        if number == len(self.rollout.passed):
            self.rollout.passed.append(begun)
        run.current = self.rollout.passed[number]

    def _wrapped(self, watched: Watched, original: Callable[..., Any]) -> Callable[..., Any]:
        source, router = self.source, watched.router

        def routing(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.run.part is None or self.run.current is None or not source.replaying():
                return original(logits, *args, **kwargs)
            self.run.replayed = True
            rows, before = source.rows(router), source.consumed(router)
            own = self.own and source.has_queue(router)
            with source.passing_over(router) if own else nullcontext():
                result = original(logits, *args, **kwargs)
            self._check_queue(watched, before)
            if rows is not None:
                self._compare(watched, logits, rows, result[1])
            return result

        return routing

    def _check_queue(self, watched: Watched, before: int | None) -> None:
        """Note what the host's own counters show, which costs the device nothing."""
        router, batch = watched.router, self.run.calls[watched.layer]
        self.run.calls[watched.layer] += not in_backward()
        if not self.source.has_queue(router):
            self.note("no_queue", watched, batch)
        elif before is not None and before >= self.source.recorded(router):
            self.note("empty", watched, batch)
        elif before is not None and self.source.consumed(router) == before:
            self.note("skipped", watched, batch)

    @torch.no_grad()
    def _compare(self, watched: Watched, logits: Tensor, rows: Tensor, used: Tensor) -> None:
        """Add up what the router did."""
        if in_backward():
            return
        assert self.run.current is not None
        scores = selection_scores(watched.router, logits.detach().flatten(0, -2))
        rows = rows.to(scores.device, non_blocking=True)
        # With a capacity the map lacks tokens that overflow.
        drops = watched.router.config.moe_expert_capacity_factor is not None
        compared = compare(scores, rows, used.bool(), replays=not self.own and not drops)
        self.run.current.add(watched.layer, self.sums.table, compared)
        self.run.compared += 1
