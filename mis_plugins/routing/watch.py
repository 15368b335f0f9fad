"""The watch over the routers of one process: what each was told, what it did, and what it would have done alone.

Routers are wrapped where they run. Nothing in a forward waits for the device or for another rank: sums stay on the
device until the step hook reduces them (`routing/report.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mis_plugins.routing.choice import compare, selection_scores, strange_at_random
from mis_plugins.routing.fault import Fault, Kind
from mis_plugins.routing.placement import Grid, placement
from mis_plugins.routing.source import Source
from mis_plugins.routing.table import (
    CLASSES,
    LOG_PROB,
    SPLIT,
    TRAIN,
    Flags,
    Gathered,
    Passed,
    Ran,
    empty_table,
)

MTP = re.compile(r"(^|\.)mtp(\.|$)")


@dataclass
class Watched:
    """One router. layer: index among all layers of the model; chunk: index among this rank's model chunks."""

    router: Any
    layer: int
    chunk: int
    calls: int = 0

    @property
    def random(self) -> float:
        return strange_at_random(self.router.config.num_moe_experts, self.router.topk)


def routers_of(model: Sequence[nn.Module]) -> Iterator[Watched]:
    """Megatron's routers in the chunks of a model; those of multi-token prediction, which no host replays, left out."""
    for chunk, part in enumerate(model):
        for name, module in part.named_modules():
            routes = (
                hasattr(module, "routing") and hasattr(module, "topk") and hasattr(module, "score_function")
            )
            if routes and not MTP.search(name) and not getattr(module, "is_mtp_layer", False):
                yield Watched(module, module.layer_number - 1, chunk)  # type: ignore[operator]


@dataclass
class Watch:
    """What one process saw since the step hook last read it.

    own: whether routers route by their own gates, and recorded rows are only compared.
    part: the pass that runs now; None where nothing shall watch, as in the pass of a reference model.
    current: the micro-batch that runs now.
    passed: micro-batches of the log-prob pass, on the last chunk that ran them.
    ran: micro-batches of all watched passes since the step hook last read.
    before: number of micro-batches in `ran` from before the pass that runs now.
    gathered: flags of the log-prob pass of this rollout; None where none was watched.
    chunks: number of model chunks on this rank.
    trained: number of micro-batches of this rollout that training forwards of the last chunk began.
    begun: the micro-batch that a training forward of the last chunk began last.
    replayed: whether a router of the pass that runs now should have consumed recorded rows.
    compared: how often a router compared its choice in the log-prob pass.
    unknown: how often a router ran in the log-prob pass, or should have run, and compared nothing.
    """

    source: Source
    grid: Grid
    own: bool = False
    stage: int = 0
    watched: list[Watched] = field(default_factory=list)
    batches: dict[int, int] = field(default_factory=dict)
    part: str | None = None
    table: Float[Tensor, "L K P"] | None = None
    split: Float[Tensor, "C R"] | None = None
    current: Passed | None = None
    passed: list[Passed] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    before: int = 0
    gathered: Gathered | None = None
    chunks: int = 1
    trained: int = 0
    begun: Passed | None = None
    replayed: bool = False
    compared: int = 0
    unknown: int = 0
    faults: dict[tuple[Kind, int], Fault] = field(default_factory=dict)

    def install(self, model: Sequence[nn.Module], layers: int) -> None:
        """Wrap every router of the model, and hear when each chunk begins a micro-batch."""
        self.watched, self.chunks = list(routers_of(model)), len(model)
        for watched in self.watched:
            watched.router.routing = self._wrapped(watched, watched.router.routing)
        for chunk, part in enumerate(model):
            part.register_forward_pre_hook(self._begins(chunk), with_kwargs=True)
        device = next((p.device for part in model for p in part.parameters()), torch.device("cpu"))
        self.table = empty_table(layers, device)
        self.split = torch.zeros(len(CLASSES), len(SPLIT), dtype=torch.float64, device=device)

    def set_aside(self) -> dict[str, Any]:
        """End the pass, return everything that was seen, and begin as if nothing had been seen."""
        self.end()
        seen = dict(vars(self))
        self.take_back(None)
        return seen

    def take_back(self, seen: dict[str, Any] | None) -> None:
        """Restore what was set aside, and forget everything else; None begins as if nothing had been seen."""
        assert self.table is not None and self.split is not None
        fresh = Watch(self.source, self.grid, self.own, self.stage, self.watched, chunks=self.chunks)
        fresh.table, fresh.split = torch.zeros_like(self.table), torch.zeros_like(self.split)
        vars(self).update(vars(fresh) if seen is None else seen)

    def begin(self, part: str | None) -> None:
        """Begin a pass. A log-prob pass drops what an earlier one told of single tokens."""
        self.end()
        self.part, self.current = part, None
        self.batches = {}
        for watched in self.watched:
            watched.calls = 0
        if part == LOG_PROB:
            self.passed, self.gathered, self.trained, self.compared = [], None, 0, 0
            # Without a step hook nobody reads earlier log-prob passes, and they would pile up.
            self.ran = [one for one in self.ran if one.part == TRAIN]
        self.before = len(self.ran)

    def _begins(self, chunk: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            loss_mask = kwargs.get("loss_mask")
            if self.part is None or loss_mask is None:
                self.current = None
                return
            packed = kwargs.get("packed_seq_params")
            placed = placement(loss_mask, None if packed is None else packed.cu_seqlens_q, self.grid)
            self._enter(chunk, Passed.begin(placed, 0 if self.table is None else self.table.shape[0]))

        return hook

    def _enter(self, chunk: int, begun: Passed) -> None:
        number = self.batches.get(chunk, 0)
        self.batches[chunk] = number + 1
        begun = self._noted(number, begun)
        if self.part == TRAIN:
            self.current = begun
            if chunk == self.chunks - 1:  # the loss follows the last chunk; earlier chunks run ahead
                self.trained, self.begun = self.trained + 1, begun
            return
        if number == len(self.passed):
            self.passed.append(begun)
        self.current = self.passed[number]  # chunks of one rank add to the same rows

    def _noted(self, number: int, begun: Passed) -> Passed:
        """Keep the sums of a micro-batch for the step hook; chunks of one rank add to the same ones."""
        assert self.part is not None
        if self.before + number == len(self.ran):
            self.ran.append(Ran(self.part, number, begun.samples))
        return replace(begun, samples=self.ran[self.before + number].samples)

    def _wrapped(self, watched: Watched, original: Callable[..., Any]) -> Callable[..., Any]:
        def routing(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.part is None or self.current is None or not self.source.replaying():
                return original(logits, *args, **kwargs)
            self.replayed = True
            rows, before = self.source.rows(watched.router), self.source.consumed(watched.router)
            own = self.own and self.source.has_queue(watched.router)
            with self.source.passing_over(watched.router) if own else nullcontext():
                result = original(logits, *args, **kwargs)
            self._check_queue(watched, before)
            if rows is not None:
                self._compare(watched, logits, rows, result[1])
            return result

        return routing

    def _check_queue(self, watched: Watched, before: int | None) -> None:
        """Note what the host's own counters show, which costs the device nothing."""
        router, batch = watched.router, watched.calls
        watched.calls += torch._C._current_graph_task_id() == -1
        if not self.source.has_queue(router):
            self.note("no_queue", watched, batch)
        elif before is not None and before >= self.source.recorded(router):
            self.note("empty", watched, batch)
        elif before is not None and self.source.consumed(router) == before:
            self.note("skipped", watched, batch)

    def note(self, kind: Kind, watched: Watched, batch: int, ran: str = "") -> None:
        """Keep the first fault of each kind and layer."""
        fault = Fault(kind, watched.layer, self.stage, batch, ran)
        self.faults.setdefault((kind, watched.layer), fault)

    @torch.no_grad()
    def _compare(self, watched: Watched, logits: Tensor, rows: Tensor, used: Tensor) -> None:
        """Add up what the router did; not in a recompute inside a backward, whose forward was added."""
        if torch._C._current_graph_task_id() != -1:
            return
        assert self.current is not None and self.table is not None
        scores = selection_scores(watched.router, logits.detach().flatten(0, -2))
        rows = rows.to(scores.device, non_blocking=True)
        drops = (
            watched.router.config.moe_expert_capacity_factor is not None
        )  # the map lacks tokens that overflow
        compared = compare(scores, rows, used.bool(), replays=not self.own and not drops)
        self.current.add(watched.layer, self.table, compared)
        self.compared += self.part == LOG_PROB

    def end(self) -> None:
        """End a pass, and note routers that did not run in every micro-batch of their chunk."""
        for watched in self.watched:
            batches = self.batches.get(watched.chunk, 0)
            if self.replayed and watched.calls != batches:
                self.note("calls", watched, 0, f"{watched.calls} of {batches}")
        if self.part == LOG_PROB:
            self.unknown = sum(self.batches.get(one.chunk, 0) for one in self.watched) - self.compared
        self.part, self.replayed = None, False

    def flags(self) -> Flags | None:
        """Flags of the micro-batch whose loss is computed now; None where no log-prob pass told them.

        Where the log-prob pass cut its micro-batches otherwise than training, the flags do not fit and are
        None.
        """
        if self.gathered is None or not 0 < self.trained <= len(self.gathered.flags):
            return None
        flags = self.gathered.flags[self.trained - 1]
        same = self.begun is not None and flags.differs.shape == self.begun.placed.position.shape
        return flags if same else None
