"""Carry versions into the loss hook of a host on Megatron.

A host hands its trainer to no hook, and its micro-batches hold a fixed list of keys. So the init hook
replaces two names in the trainer's process, as the needs of the host name them:

    train_actor   called as before, after the waiting tokens are scored
    get_batch     called as before, with more keys of tokens and the version

Ray may run a subclass of its own making, into which it copied every method. So `train_actor` is replaced in the class
of the trainer that is calling the hook, not in the module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from mis_plugins.config.model import SegmentWiseConfig
from mis_plugins.config.view import view
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import megatron, tracking
from mis_plugins.hosts.loss_batch import VERSION, VERSIONS
from mis_plugins.hosts.needs import INIT
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.versions import heads, kept
from mis_plugins.hosts.versions.samples import RETRACTED, Note, recomputes, segment_wise, served
from mis_plugins.hosts.versions.scores import Data, Scores, Trainer
from mis_plugins.packing.roll_call import together
from mis_plugins.versions.segment_wise import Written, admitted

RECOMPUTED = "recomputed_log_probs"


@dataclass(frozen=True)
class Columns:
    """What the micro-batches of one rollout get: keys of tokens, and the version of its proximal policy.

    tokens: versions and recomputed log-probs of this rank's tokens, and whole responses' heads where notes have them.
    """

    version: int
    tokens: Mapping[str, Sequence[Tensor]]


class Carrying:
    """Versions and scores in one trainer process."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.scores, self.scored = Scores(), -1
        self.kept: kept.KeptScoring | None = None  # where top-p or top-k leaves a part of the vocabulary
        self._columns: Columns | None = None
        self._data: Data | None = None
        self._rollout_id, self._alive = -1, frozenset[int]()

    def before_training(self, actor: Any, rollout_id: int, data: Data) -> None:
        """Score the waiting tokens, once a version, and make the columns of the rollout in training.

        A host may repeat a rollout, with other samples on this rank, and with masks from which nothing was taken. So
        columns are made each time, and scores of the rollout in training stay until another one begins.
        """
        begins = rollout_id != self._rollout_id
        if begins:
            self.scores.keep(self._alive)
            self._rollout_id = rollout_id
        self._columns, self._data = self._made(actor, rollout_id, data, begins), data

    def of(self, data: Data) -> Columns:
        """The columns of this rollout; raises InputError where the trainer trains on another, without versions."""
        if self._columns is None or data is not self._data:
            raise InputError(
                f"{INIT}: the rollout in training went past the trainer's train_actor as it was read in "
                f"{self.trainer.needs.commit}; train on that commit, or leave the hook out"
            )
        return self._columns

    def _made(self, actor: Any, rollout_id: int, data: Data, begins: bool) -> Columns:
        version, config = self.trainer.needs.version_of(actor), segment_wise(actor.args)
        notes = together(f"{INIT}, notes of the samples", lambda: self._noted(actor, rollout_id, data, begins))
        if recomputes(config):
            self._score(actor, rollout_id, data, version, max(note.batch for note in notes))
        return together(f"{INIT}, columns", lambda: self._columns_of(actor, data, notes, version, config))

    def _noted(self, actor: Any, rollout_id: int, data: Data, begins: bool) -> list[Note]:
        key = self.trainer.needs.notes
        if data.get(key) is None:
            raise InputError(
                f"{key}: none in this rollout; give --custom-convert-samples-to-train-data-path "
                "mis_plugins.mis.convert_with_versions"
            )
        notes = [Note.of(packed, key) for packed in data[key]]
        if begins:
            self._log(actor.args, rollout_id, notes)
        if self.kept is not None:
            self.kept.take(data["tokens"], [kept.KeptSets.of(note.more) for note in notes])
        return notes

    def _columns_of(
        self, actor: Any, data: Data, notes: Sequence[Note], version: int, config: SegmentWiseConfig | None
    ) -> Columns:
        written = [self.scores.written(note, version) for note in notes]
        if config is not None:
            _admit(data, written, config)
        device, layout = data["loss_masks"][0].device, self.trainer.layout(actor.args, data)
        rows = {
            VERSIONS: layout.cut([tokens.versions for tokens in written]),
            RECOMPUTED: layout.cut([tokens.recomputed for tokens in written]),
        }
        moved = {name: [row.to(device) for row in cut] for name, cut in rows.items()}
        return Columns(version, moved | _heads(notes))

    def _log(self, args: Any, rollout_id: int, notes: Sequence[Note]) -> None:
        """Log what every note tells of the batch, on the rank that logs."""
        more, host = notes[0].more if notes else {}, self.trainer.host
        if RETRACTED in more and megatron.holds_log_probs() and host.reports(host.parallel()[0]):
            metrics = {RETRACTED: more[RETRACTED]}
            tracking.log(args, metrics, tracking.number_of(args, rollout_id, 0))

    def _score(self, actor: Any, rollout_id: int, data: Data, version: int, trained: int) -> None:
        """Score the tokens of `version` - 1, unless that was done, and note the responses that are still to come."""
        waiting = self.trainer.waiting(version - 1, trained)
        if version > self.scored and waiting.requests:
            device = data["tokens"][0].device
            self.scores.add(version, self.trainer.answers(actor, rollout_id, waiting.requests, device))
        self.scored, self._alive = max(self.scored, version), waiting.alive


@Hook
def carry_versions(args: Any) -> None:
    """The init hook of Miles and slime on Megatron: the loss hook gets versions, and log pi_{v+1} by recompute.

    It replaces the two names, once a process; not for a critic, which no weight corrects.

    Raises:
        ConfigError: versions are not carried on this host, an argument would make versions wrong,
            or the caller is not the host's trainer.
    """
    host = served(args, INIT)
    needs = host.needs
    if wrong := needs.refused(view(args), recomputes(segment_wise(args))):
        raise ConfigError(wrong)
    actor = needs.init.frame().get("self")
    if actor is None:
        raise ConfigError(
            f"{INIT}: not called by the init of the trainer on Megatron; give it there, with {needs.commit}"
        )
    if actor.role == "critic":
        return
    carrying, own = Carrying(Trainer(host)), type(actor)
    if needs.keeps_sets and kept.asked(args):
        carrying.kept = kept.KeptScoring(host)
        carrying.kept.install()
    name = needs.train_actor.name_on(own)
    model, get_batch = needs.get_batch.owner()
    setattr(own, name, _before(getattr(own, name), carrying))
    setattr(model, get_batch, _with_columns(getattr(model, get_batch), carrying))


def _before(train_actor: Callable[..., Any], carrying: Carrying) -> Callable[..., Any]:
    names = carrying.trainer.needs.train_actor.parameters

    @wraps(train_actor)
    def carried(*given: Any, **named: Any) -> Any:
        arguments = dict(zip(names, given, strict=False)) | named
        carrying.before_training(*(arguments[name] for name in names))
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


def _heads(notes: Sequence[Note]) -> dict[str, Sequence[Tensor]]:
    """The engine's likeliest tokens of whole responses, on the CPU: the loss hook moves what its own tokens need."""
    named = [heads.unpacked(note.more, len(note.versions)) for note in notes]
    return {name: [head[name] for head in named] for name in (named[0] if named else ())}


def _admit(data: Data, written: Sequence[Written], config: SegmentWiseConfig) -> None:
    """Refuse tokens that cannot be weighed, or take them out of the loss mask, as `too_old` says."""
    lengths = [len(mask) for mask in data["loss_masks"]]
    masks = torch.cat(list(data["loss_masks"])).bool().cpu().split(lengths)  # once a rollout
    names = [str(index) for index in data["sample_indices"]]
    left = admitted(names, written, masks, config)
    if config.too_old == "drop":
        data["loss_masks"] = [old.new_tensor(mask.tolist()) for old, mask in zip(data["loss_masks"], left, strict=True)]
