"""Carry versions into the loss hook of a host on Megatron.

A host hands its trainer to no hook, and its micro-batches hold a fixed list of keys. So the init hook
replaces two names in the trainer's process, as the needs of the host name them:

    train_actor   called as before, after the waiting tokens are scored
    get_batch     called as before, with two more keys and the version

Ray may run a subclass of its own making, into which it copied every method. So `train_actor` is replaced in the class
of the trainer that is calling the hook, not in the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mis_plugins.config.model import SegmentWiseConfig
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.batch import host_layout
from mis_plugins.hosts.loss_batch import VERSION, VERSIONS
from mis_plugins.hosts.versions import rollouts
from mis_plugins.hosts.versions.note import Note
from mis_plugins.hosts.versions.scores import Plan, Scores
from mis_plugins.hosts.versions.settings import LOGLINEAR, recomputes, segment_wise
from mis_plugins.hosts.versions.shelf import Waiting
from mis_plugins.hosts.versions.trainer import CANNOT, Data, Trainer
from mis_plugins.packing.layout import Layout, gathered
from mis_plugins.versions.recompute import Request
from mis_plugins.versions.segment_wise import Written, admitted

INIT = "--custom-megatron-init-path mis_plugins.mis.carry_versions"
RECOMPUTED = "recomputed_log_probs"


@dataclass(frozen=True)
class Columns:
    """What the micro-batches of one rollout get: two keys of tokens, and the version of its proximal policy."""

    rollout_id: int
    version: int
    tokens: Mapping[str, Sequence[Tensor]]


class Carrying:
    """Versions and scores in one trainer process."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.scores, self.scored = Scores(), -1
        self._columns: Columns | None = None
        self._data: Data | None = None
        self._rollout_id, self._alive = -1, frozenset[int]()

    def before_training(self, actor: Any, rollout_id: int, data: Data) -> None:
        """Score the waiting tokens, once a version, and make the columns of the rollout in training.

        A host may repeat a rollout, with other samples on this rank, and with masks from which nothing was taken. So
        columns are made each time, and scores of the rollout in training stay until another one begins.
        """
        if rollout_id != self._rollout_id:
            self.scores.keep(self._alive)
            self._rollout_id = rollout_id
        self._columns, self._data = self._made(actor, rollout_id, data), data

    def of(self, data: Data) -> Columns:
        """The columns of this rollout.

        Raises:
            InputError: the trainer trains on another rollout, whose weights would silently lack versions.
        """
        if self._columns is None or data is not self._data:
            raise InputError(
                f"{INIT}: the rollout in training went past the trainer's train_actor as it was read in "
                f"{self.trainer.title}; train on that commit, or leave the hook out"
            )
        return self._columns

    def _made(self, actor: Any, rollout_id: int, data: Data) -> Columns:
        args, version, key = actor.args, self.trainer.weight_version(actor), self.trainer.notes
        if data.get(key) is None:
            raise InputError(
                f"{key}: none in this rollout; give --custom-convert-samples-to-train-data-path "
                "mis_plugins.mis.convert_with_versions"
            )
        notes = [Note.of(packed, key) for packed in data[key]]
        config = segment_wise(args)
        if recomputes(config):
            self._alive = self._score(actor, rollout_id, data, version, max(note.batch for note in notes))
        written = [self.scores.written(note, version) for note in notes]
        if config is not None:
            _admit(data, written, config)
        return Columns(rollout_id, version, self._sliced(args, data, written))

    def _score(self, actor: Any, rollout_id: int, data: Data, version: int, trained: int) -> frozenset[int]:
        """Score the tokens of `version` - 1, unless that was done; return the responses that are still to come."""
        found = self._asked(version - 1, trained)
        if version > self.scored:
            if found.requests:
                answers = self._answers(actor, rollout_id, found.requests, data["tokens"][0].device)
                self.scores.add(version, answers)
            self.scored = version
        return found.alive

    def _asked(self, version: int, trained: int) -> Waiting:
        """Ask on rank 0 which tokens wait to be scored, and tell all ranks. Collective."""
        found: list[Waiting | None] = [None]
        if dist.get_rank() == 0:
            found = [rollouts.waiting(version, trained)]
        dist.broadcast_object_list(found, src=0, group=self._group)
        assert found[0] is not None
        return found[0]

    def _answers(
        self, actor: Any, rollout_id: int, requests: Sequence[Request], device: torch.device
    ) -> dict[int, tuple[Sequence[int], Tensor]]:
        """Log-probs of the requested tokens, by the host's own log-prob pass, on every rank. Collective."""
        split = self.trainer.split(actor)
        mine = Plan.of(requests, split.budget, split.ranks, split.multiple).shares[split.rank]
        asked = list(itertools.chain.from_iterable(mine))
        ends = list(itertools.accumulate((len(batch) for batch in mine), initial=0))
        micro_batches = [list(range(start, stop)) for start, stop in itertools.pairwise(ends)]
        data = _as_rollout(asked, device)
        rows = self.trainer.log_probs(actor, rollout_id, data, micro_batches)
        # Gathering is collective over context-parallel ranks: each of them does it, whoever answers.
        whole = [] if rows is None else self._whole(actor.args, data, rows)
        own = {}
        if rows is not None and split.answers:
            own = {
                one.number: (one.positions, _wanted(one, row)) for one, row in zip(asked, whole, strict=True)
            }
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own, group=self._group)
        return {number: answer for part in parts for number, answer in part.items()}

    @cached_property
    def _group(self) -> Any:
        """A group of all ranks on the CPU. Making it is collective."""
        return dist.new_group(backend="gloo")

    def _layout(self, args: Any, data: Data) -> Layout:
        lengths = data["total_lengths"], data["response_lengths"]
        return host_layout(args, *lengths, data.get("max_seq_lens"), *self.trainer.parallel()[1])

    def _whole(self, args: Any, data: Data, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gather rows that are cut over context-parallel ranks into whole responses. Collective."""
        return gathered(self._layout(args, data), rows, self.trainer.parallel()[0].cp)

    def _sliced(self, args: Any, data: Data, written: Sequence[Written]) -> dict[str, list[Tensor]]:
        """Versions and recomputed log-probs of the tokens on this rank."""
        device, layout = data["loss_masks"][0].device, self._layout(args, data)

        def cut(rows: Sequence[Tensor]) -> list[Tensor]:
            return [row.to(device) for row in layout.cut(rows)]

        return {
            VERSIONS: cut([one.versions for one in written]),
            RECOMPUTED: cut([one.recomputed for one in written]),
        }


def install(args: Any, trainer: Trainer) -> None:
    """Replace the two names, once a process; not for a critic, which no weight corrects.

    Raises:
        ConfigError: an argument of the host under which versions would say something else, or the caller is
            not the host's trainer.
    """
    _check(args, trainer)
    actor = trainer.needs.init.frame().get("self")
    if actor is None:
        raise ConfigError(
            f"{INIT}: not called by the init of the trainer on Megatron; give it there, with {trainer.title}"
        )
    if actor.role == "critic":
        return
    carrying, own = Carrying(trainer), type(actor)
    name = trainer.needs.train_actor.name_on(own)
    model, get_batch = trainer.needs.get_batch.owner()
    setattr(own, name, _before(getattr(own, name), carrying))
    setattr(model, get_batch, _with_columns(getattr(model, get_batch), carrying))


def _check(args: Any, trainer: Trainer) -> None:
    for name, why in (CANNOT | dict(trainer.cannot)).items():
        if getattr(args, name, False):
            raise ConfigError(f"--{name.replace('_', '-')}: {why}; leave it out, or {INIT}")
    scored = recomputes(segment_wise(args))
    if scored and getattr(args, "use_rollout_routing_replay", False):
        raise ConfigError(
            "--use-rollout-routing-replay: recompute scores without the engine's routes, and log_probs are with them; "
            f"{LOGLINEAR}"
        )
    trainer.check(args, scored)


def _before(train_actor: Callable[..., Any], carrying: Carrying) -> Callable[..., Any]:
    names = carrying.trainer.needs.train_actor.parameters

    @wraps(train_actor)
    def carried(*given: Any, **named: Any) -> Any:
        said = dict(zip(names, given, strict=False)) | named
        carrying.before_training(*(said[name] for name in names))
        return train_actor(*given, **named)

    return carried


def _with_columns(get_batch: Callable[..., Any], carrying: Carrying) -> Callable[..., Any]:
    @wraps(get_batch)
    def carried(data_iterator: Any, keys: Sequence[str], *rest: Any, **more: Any) -> Any:
        if "advantages" not in keys:  # a pass that only scores
            return get_batch(data_iterator, keys, *rest, **more)
        columns = carrying.of(data_iterator.rollout_data)
        # Not earlier: before it trains, the host averages every key of the rollout. Its dump comes later.
        data_iterator.rollout_data.update(columns.tokens, **{VERSION: columns.version})
        batch = get_batch(data_iterator, [*keys, *columns.tokens], *rest, **more)
        batch[VERSION] = columns.version
        return batch

    return carried


def _wanted(request: Request, row: Tensor) -> Tensor:
    return torch.tensor(request.wanted(row.float().tolist()))


def _as_rollout(requests: Sequence[Request], device: torch.device) -> Data:
    """The requests as a rollout, with the keys that the host's log-prob pass reads."""
    return {
        "tokens": [torch.tensor(one.tokens, dtype=torch.long, device=device) for one in requests],
        "loss_masks": [torch.ones(one.count, dtype=torch.int, device=device) for one in requests],
        "total_lengths": [len(one.tokens) for one in requests],
        "response_lengths": [one.count for one in requests],
    }


def _admit(data: Data, written: Sequence[Written], config: SegmentWiseConfig) -> None:
    """Refuse tokens that cannot be weighed, or take them out of the loss mask, as `too_old` says."""
    lengths = [len(mask) for mask in data["loss_masks"]]
    masks = torch.cat(list(data["loss_masks"])).bool().cpu().split(lengths)  # once a rollout
    names = [str(index) for index in data["sample_indices"]]
    left = admitted(names, written, masks, config)
    if config.too_old == "drop":
        data["loss_masks"] = [
            old.new_tensor(mask.tolist()) for old, mask in zip(data["loss_masks"], left, strict=True)
        ]
