"""Log pi_{v+1} on the trainer's side: the host's own log-prob pass over waiting tokens, and what it gave them.

A trainer that has just moved to version V holds pi_V until its next optimizer step. So it scores the tokens of V - 1
when it gets its next batch, before it trains, whether their responses are running, queued or on their way by then.
"""

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from mis_plugins.hosts.batch import layout_of
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.needs import VersionNeeds
from mis_plugins.hosts.versions import rollouts
from mis_plugins.hosts.versions.samples import Note
from mis_plugins.packing.exchange import gathered
from mis_plugins.packing.layout import Layout
from mis_plugins.packing.roll_call import met, timeout, together
from mis_plugins.versions.segment_wise import Written
from mis_plugins.versions.spans import Request, batches

Data = dict[str, Any]
Answers = Mapping[int, tuple[Sequence[int], Float[Tensor, " n"]]]
"""By the number of a response: positions of tokens in it, and their log-probs."""
PREFIX = "mis_next_"
ASKING, SCORING = (f"recomputed log-probs, {what}" for what in ("asking which tokens wait", "scoring the tokens"))


def shares(requests: Sequence[Request], budget: int, ranks: int, multiple: int) -> list[list[list[Request]]]:
    """The micro-batches of each data-parallel rank: equally many, so that the model's collectives meet.

    A rank with fewer is filled up with the first of all micro-batches.

    Args:
        budget: tokens of a micro-batch.
        multiple: the number of micro-batches of each rank is a multiple of this.
    """
    packed = batches(requests, budget)
    count = -(-len(packed) // (ranks * multiple)) * multiple
    by_rank = (packed[rank::ranks] for rank in range(ranks))
    return [[*share, *[packed[0]] * (count - len(share))] for share in by_rank]


@dataclass(frozen=True)
class Trainer:
    """The trainer of a host on Megatron, as far as it scores waiting tokens."""

    host: Host

    @property
    def needs(self) -> VersionNeeds:
        return self.host.needs

    @cached_property
    def group(self) -> Any:
        """A group of all ranks on the CPU. Making it is collective."""
        return dist.new_group(backend="gloo", timeout=timeout())

    def waiting(self, version: int, trained: int) -> rollouts.Waiting:
        """Ask on rank 0 which tokens of `version` wait to be scored, and tell all ranks. Collective."""
        asks = dist.get_rank() == 0
        shared = [together(ASKING, lambda: rollouts.waiting(version, trained) if asks else None)]
        met(f"{ASKING}, handing on", lambda: dist.broadcast_object_list(shared, src=0, group=self.group))
        assert shared[0] is not None
        return shared[0]

    def answers(self, actor: Any, rollout_id: int, requests: Sequence[Request], device: torch.device) -> Answers:
        """Log-probs of the requested tokens, by the host's own log-prob pass, on every rank. Collective."""
        ranks, (cp_size, cp_rank) = self.host.parallel()
        chunks, multiple = self.needs.virtual_pipeline(actor)
        size, rank = (1, 0) if ranks.dp is None else (ranks.dp.size(), ranks.dp.rank())
        mine = shares(requests, (actor.args.max_tokens_per_gpu or 1) * cp_size, size, multiple)[rank]
        asked = list(itertools.chain.from_iterable(mine))
        data = {  # a rollout, with the keys that the host's log-prob pass reads
            "tokens": [torch.tensor(request.tokens, dtype=torch.long, device=device) for request in asked],
            "loss_masks": [torch.ones(request.count, dtype=torch.int, device=device) for request in asked],
            "total_lengths": [len(request.tokens) for request in asked],
            "response_lengths": [request.count for request in asked],
        }
        rows = self._scored(actor, rollout_id, data, [len(batch) for batch in mine], chunks)
        # Gathering is collective over context-parallel ranks: each of them does it, whoever answers.
        whole = [] if rows is None else gathered(self.layout(actor.args, data), rows, ranks.cp)
        answers = rows is not None and cp_rank == 0 and (ranks.tp is None or ranks.tp.rank() == 0)
        own = together(SCORING, lambda: _answered(asked, whole) if answers else {})
        parts: list[Any] = [None] * dist.get_world_size()
        met(f"{SCORING}, handing on", lambda: dist.all_gather_object(parts, own, group=self.group))
        return {number: answer for part in parts for number, answer in part.items()}

    def layout(self, args: Any, data: Data) -> Layout:
        """Where the responses of a rollout lie on this rank."""
        return layout_of(args, data, self.host.parallel()[1])

    def _scored(
        self, actor: Any, rollout_id: int, data: Data, counts: Sequence[int], chunks: int
    ) -> Sequence[Tensor] | None:
        """Score each sequence's last tokens under the actor's weights; None off the last pipeline stage."""
        needs, ends = self.needs, list(itertools.accumulate(counts, initial=0))
        micro_batches = [list(range(start, stop)) for start, stop in itertools.pairwise(ends)]
        with needs.own_routes(actor):
            if needs.active_model.of(actor) != "actor":
                needs.switch_model.of(actor)("actor")
            made = needs.iterator.get()
            iterators = [made(data, micro_batch_indices=list(micro_batches)) for _ in range(chunks)]
            return needs.rescore(actor, iterators, [len(micro_batches)], PREFIX, rollout_id)


@dataclass(frozen=True)
class Scored:
    """Log-probs under version `by` of some tokens of a response, at these `positions` in the response."""

    by: int
    positions: Sequence[int]
    log_probs: Float[Tensor, " n"]


class Scores:
    """Scores of the responses that are not trained on yet."""

    def __init__(self) -> None:
        self._of: dict[int, list[Scored]] = {}

    def add(self, version: int, answers: Answers) -> None:
        """Keep the log-probs that `version` gives to some tokens of each response."""
        for number, (positions, log_probs) in answers.items():
            self._of.setdefault(number, []).append(Scored(version, positions, log_probs))

    def keep(self, alive: AbstractSet[int]) -> None:
        """Forget all other responses."""
        self._of = {number: scored for number, scored in self._of.items() if number in alive}

    def written(self, note: Note, current: int) -> Written:
        """Versions v of a response's tokens, and their log pi_{v+1} where it was scored, else NaN."""
        versions = torch.tensor(note.versions, dtype=torch.int64)
        recomputed = torch.full(versions.shape, torch.nan, dtype=torch.float32)
        for answer in self._of.get(note.number, ()):
            places = torch.tensor(answer.positions, dtype=torch.int64)
            fits = places < len(versions)
            places, log_probs = places[fits], answer.log_probs[fits]
            next_one = versions[places] + 1 == answer.by
            recomputed[places[next_one]] = log_probs[next_one]
        return Written(versions, recomputed, current)


def _answered(requests: Sequence[Request], rows: Sequence[Tensor]) -> Answers:
    return {
        request.number: (request.positions, torch.tensor(request.wanted(row.tolist()), dtype=torch.float32))
        for request, row in zip(requests, rows, strict=True)
    }
