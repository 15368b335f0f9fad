"""Versions into the loss hook of Miles on Megatron.

Miles hands no hook of its trainer the rollout data, and its micro-batches hold a fixed list of keys. So the init hook
replaces two names in the trainer's process, both read in Miles 31f1ca9, `miles/backends/megatron_utils/`:

    actor.py:464   train_actor   called as before, once what is needed has been scored
    model.py:481   get_batch     called as before, with two more keys, and the version set beside

Ray runs a subclass of its own making, into which it copied every method. So `train_actor` is replaced in the class of
the trainer that is calling the hook, not in the module.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.config.model import SegmentWiseConfig
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.loss_batch import VERSION, VERSIONS
from mis_plugins.hosts.rollout_data import TRAINER, held_by
from mis_plugins.hosts.versions.scores import Plan, Scores
from mis_plugins.hosts.versions.shelf import Note, Waiting, waiting
from mis_plugins.versions.recompute import Request
from mis_plugins.versions.segment_wise import Written, admitted

MODEL = "miles.backends.megatron_utils.model"
RECOMPUTED, PREFIX = "recomputed_log_probs", "mis_next_"
CANNOT = {
    "keep_old_actor": "log_probs are then of earlier weights than those that the version names",
    "allgather_cp": "tokens are then laid out otherwise than recompute reads them",
    "multi_lora": "each adapter then has versions of its own",
}
Data = dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """What the micro-batches of one rollout get: two keys of tokens, and the version of its proximal policy."""

    rollout_id: int
    version: int
    tokens: Mapping[str, Sequence[Tensor]]


class Carrying:
    """What one trainer process knows of versions."""

    def __init__(self) -> None:
        self.scores, self.scored = Scores(), -1
        self._columns: Columns | None = None
        self._data: Data | None = None

    def before_training(self, actor: Any, rollout_id: int, data: Data) -> None:
        """Score what waits, once a version, and make the columns of the rollout that is trained on now."""
        if self._columns is None or self._columns.rollout_id != rollout_id:  # a host may repeat a rollout
            self._columns = self._made(actor, rollout_id, data)
        self._data = data

    def of(self, data: Data) -> Columns:
        """The columns of this rollout.

        Raises:
            InputError: the trainer trains on another, so that weights would silently be those without versions.
        """
        if self._columns is None or data is not self._data:
            raise InputError(
                "--custom-megatron-init-path mis_plugins.mis.carry_versions: the rollout in training went past "
                "the trainer's train_actor as it was read in Miles 31f1ca9; train on that Miles, or leave the hook out"
            )
        return self._columns

    def _made(self, actor: Any, rollout_id: int, data: Data) -> Columns:
        args, version = actor.args, actor.weight_updater.weight_version
        if data.get("weight_versions") is None:
            raise InputError(
                "weight_versions: none in this rollout; give --custom-convert-samples-to-train-data-path "
                "mis_plugins.mis.convert_with_versions"
            )
        notes = [Note.of(packed) for packed in data["weight_versions"]]
        config = segment_wise(args)
        alive = None
        if recomputes(config):
            alive = self._score(actor, rollout_id, version, max(note.batch for note in notes))
        written = [self.scores.written(note, version) for note in notes]
        if alive is not None:
            self.scores.keep(alive)
        if config is not None:
            _admit(data, written, config)
        return Columns(rollout_id, version, _sliced(args, data, written))

    def _score(self, actor: Any, rollout_id: int, version: int, trained: int) -> frozenset[int]:
        """Score the tokens of `version` - 1, unless that was done; return the responses that are still to come."""
        found = _asked(actor, version - 1, trained)
        if version > self.scored:
            if found.requests:
                self.scores.add(version, _scored(actor, rollout_id, found.requests))
            self.scored = version
        return found.alive


def install(args: Any) -> None:
    """Replace the two names, once a process; nothing in a critic's, which no weight corrects.

    Raises:
        ConfigError: an argument under which versions would say something else, or the hook is called by another than
            Miles's trainer.
    """
    for name, why in CANNOT.items():
        if getattr(args, name, False):
            raise ConfigError(
                f"--{name.replace('_', '-')}: {why}; leave it out, or --custom-megatron-init-path"
            )
    _check_pause(args)
    if recomputes(segment_wise(args)):
        _check_recompute(args)
    actor = held_by(TRAINER, "init").get("self")
    if actor is None:
        raise ConfigError(
            "--custom-megatron-init-path mis_plugins.mis.carry_versions: not called by the init of Miles's trainer on "
            "Megatron; give it there, with Miles 31f1ca9"
        )
    if actor.role == "critic":
        return
    carrying, trainer, model = Carrying(), type(actor), importlib.import_module(MODEL)
    trainer.train_actor = _before(trainer.train_actor, carrying)
    vars(model)["get_batch"] = _with_columns(model.get_batch, carrying)


def _check_pause(args: Any) -> None:
    """SGLang names a token by the version at its arrival, and an overlapped step arrives after the update."""
    overlapped = not getattr(args, "sglang_disable_overlap_schedule", False)
    if getattr(args, "pause_generation_mode", None) == "in_place" and overlapped:
        raise ConfigError(
            "--pause-generation-mode in_place: with SGLang's overlapped schedule the first token after an update "
            "counts as the new version's; give --sglang-disable-overlap-schedule, or pause by retract"
        )


def _check_recompute(args: Any) -> None:
    instead = "say mis.segment_wise.method: loglinear"
    if getattr(args, "use_rollout_routing_replay", False):
        raise ConfigError(
            "--use-rollout-routing-replay: recompute scores without the engine's routes, and log_probs are with them; "
            f"{instead}"
        )
    if getattr(args, "qkv_format", "thd") != "thd":
        raise ConfigError(
            f"--qkv-format {args.qkv_format}: recompute scores packed sequences alone; {instead}"
        )


def segment_wise(args: Any) -> SegmentWiseConfig | None:
    """Segment-wise weights as the loss hook will have them; None where they are off."""
    config = reading.from_args(args).where_versions_are_known()
    return config.segment_wise if config.segment_wise_on else None


def recomputes(config: SegmentWiseConfig | None) -> bool:
    """Whether weights read what a recompute stored."""
    return config is not None and config.method == "recompute"


def _before(train_actor: Callable[..., Any], carrying: Carrying) -> Callable[..., Any]:
    @wraps(train_actor)
    def carried(self: Any, rollout_id: int, rollout_data: Data, *rest: Any, **more: Any) -> Any:
        carrying.before_training(self, rollout_id, rollout_data)
        return train_actor(self, rollout_id, rollout_data, *rest, **more)

    return carried


def _with_columns(get_batch: Callable[..., Any], carrying: Carrying) -> Callable[..., Any]:
    @wraps(get_batch)
    def carried(data_iterator: Any, keys: Sequence[str], *rest: Any, **more: Any) -> Any:
        if "advantages" not in keys:  # of a pass that only scores
            return get_batch(data_iterator, keys, *rest, **more)
        columns = carrying.of(data_iterator.rollout_data)
        # Only now, as the host averages every key that it knows before it trains; its dump comes later.
        data_iterator.rollout_data.update(columns.tokens, **{VERSION: columns.version})
        batch = get_batch(data_iterator, [*keys, *columns.tokens], *rest, **more)
        batch[VERSION] = columns.version
        return batch

    return carried


def _asked(actor: Any, version: int, trained: int) -> Waiting:
    """What waits, asked by one rank and told to all. Collective."""
    import ray  # type: ignore[import-not-found]
    from miles.utils.distributed_utils import get_gloo_group  # type: ignore[import-not-found]

    found: list[Waiting | None] = [None]
    if dist.get_rank() == 0:
        found = [ray.get(actor.rollout_manager.__ray_call__.remote(waiting, version, trained))]
    dist.broadcast_object_list(found, src=0, group=get_gloo_group())
    assert found[0] is not None
    return found[0]


def _scored(
    actor: Any, rollout_id: int, requests: Sequence[Request]
) -> dict[int, tuple[Sequence[int], Tensor]]:
    """Log-probs of what is asked for, by the host's own log-prob pass, on every rank. Collective."""
    from miles.backends.training_utils.parallel import get_parallel_state  # type: ignore[import-not-found]
    from miles.utils.distributed_utils import get_gloo_group  # type: ignore[import-not-found]

    args, state = actor.args, get_parallel_state()
    budget = (args.max_tokens_per_gpu or 1) * state.cp.size
    multiple = state.microbatch_group_size_per_vp_stage if (state.vpp_size or 1) > 1 else 1
    plan = Plan.of(requests, budget, state.effective_dp.size, multiple)
    mine = plan.shares[state.effective_dp.rank]
    rows = _passed(actor, rollout_id, mine, state)
    asked = list(itertools.chain.from_iterable(mine))
    own = {}
    if rows is not None and state.tp.rank == state.cp.rank == 0:
        own = {one.number: (one.positions, _wanted(one, row)) for one, row in zip(asked, rows, strict=True)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own, group=get_gloo_group())
    return {number: answer for part in parts for number, answer in part.items()}


def _wanted(request: Request, row: Tensor) -> Tensor:
    return torch.tensor(request.wanted(row.tolist()))


def _passed(
    actor: Any, rollout_id: int, micro_batches: Sequence[Sequence[Request]], state: Any
) -> list[Tensor] | None:
    """The log-probs of each sequence's last tokens, whole and on the host; None off the last pipeline stage."""
    from miles.backends.training_utils.cp_utils import all_gather_with_cp  # type: ignore[import-not-found]
    from miles.backends.training_utils.data import DataIterator  # type: ignore[import-not-found]
    from miles.utils.replay_base import all_replay_managers  # type: ignore[import-not-found]

    ends = list(itertools.accumulate((len(batch) for batch in micro_batches), initial=0))
    indices = [list(range(*ends[i : i + 2])) for i in range(len(micro_batches))]
    data = _as_rollout(list(itertools.chain.from_iterable(micro_batches)), actor.args)
    iterators = [DataIterator(data, micro_batch_indices=indices) for _ in range(state.vpp_size or 1)]
    stages = [manager.stage for manager in all_replay_managers]
    actor._set_replay_stage("fallthrough")
    if actor._active_model_tag != "actor":
        actor._switch_model("actor")
    found = actor.compute_log_prob(iterators, [len(indices)], rollout_id=rollout_id, store_prefix=PREFIX)
    for manager, stage in zip(all_replay_managers, stages, strict=True):
        manager.stage = stage
    rows = found.get(f"{PREFIX}log_probs")
    if rows is None:
        return None
    lengths = zip(rows, data["total_lengths"], data["response_lengths"], strict=True)
    return [all_gather_with_cp(row, total, response).float().cpu() for row, total, response in lengths]


def _as_rollout(requests: Sequence[Request], args: Any) -> Data:
    """What the host's log-prob pass reads of a rollout."""
    device = torch.cuda.current_device()
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


def _sliced(args: Any, data: Data, written: Sequence[Written]) -> dict[str, list[Tensor]]:
    """Versions and recomputed log-probs of the tokens on this rank, as the host cuts rollout_log_probs."""
    from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp  # type: ignore[import-not-found]

    device = data["loss_masks"][0].device
    padded = data.get("max_seq_lens") or [None] * len(written)
    lengths = list(zip(data["total_lengths"], data["response_lengths"], padded, strict=True))

    def cut(rows: Sequence[Tensor]) -> list[Tensor]:
        return [
            slice_log_prob_with_cp(row, total, response, args.qkv_format, longest).to(device)
            for row, (total, response, longest) in zip(rows, lengths, strict=True)
        ]

    return {
        VERSIONS: cut([one.versions for one in written]),
        RECOMPUTED: cut([one.recomputed for one in written]),
    }
