"""The trainer of slime. It pauses by `abort` alone, so that no engine writes on while an update is under way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.adapters.slime import TRAINER
from mis_plugins.hosts.versions.settings import LOGLINEAR
from mis_plugins.hosts.versions.shelf import Waiting
from mis_plugins.hosts.versions.slime.shelf import waiting
from mis_plugins.hosts.versions.trainer import PREFIX, Data, Split

STAGE = "ROUTING_REPLAY_STAGE"


class SlimeTrainer:
    title = "slime 624b824"
    actor = TRAINER
    model = "slime.backends.megatron_utils.model"
    notes = "source_names"
    cannot: Mapping[str, str] = {}

    def check(self, args: Any, recomputes: bool) -> None:
        if recomputes and getattr(args, "release_train", False):
            raise ConfigError(f"--release-train: what was scored ends with the trainer; {LOGLINEAR}")
        if recomputes and getattr(args, "rollout_top_p", 1.0) != 1.0:
            raise ConfigError(
                f"--rollout-top-p {args.rollout_top_p}: recompute scores the whole vocabulary; {LOGLINEAR}"
            )

    def group(self) -> Any:
        from slime.utils.distributed_utils import get_gloo_group  # type: ignore[import-not-found]

        return get_gloo_group()

    def waiting(self, actor: Any, version: int, trained: int) -> Waiting:
        return waiting(version, trained)

    def split(self, actor: Any) -> Split:
        from megatron.core import mpu

        config = actor.train_parallel_config
        return Split(
            budget=(actor.args.max_tokens_per_gpu or 1) * config["cp_size"],
            ranks=config["dp_size"],
            rank=mpu.get_data_parallel_rank(with_context_parallel=False),
            multiple=config["microbatch_group_size_per_vp_stage"],
            answers=mpu.get_tensor_model_parallel_rank() == mpu.get_context_parallel_rank() == 0,
        )

    def log_probs(
        self, actor: Any, rollout_id: int, data: Data, micro_batches: Sequence[list[int]]
    ) -> Sequence[Tensor] | None:
        from slime.backends.megatron_utils.data import DataIterator  # type: ignore[import-not-found]

        if getattr(actor.args, "use_routing_replay", False):
            os.environ[STAGE] = "fallthrough"  # the host sets its own before each of its passes
        if actor._active_model_tag != "actor":
            actor._switch_model("actor")
        vpp_size = actor.train_parallel_config["vpp_size"]
        iterators = [DataIterator(data, list(micro_batches)) for _ in range(vpp_size)]
        found = actor.compute_log_prob(iterators, [len(micro_batches)], store_prefix=PREFIX)
        return found.get(f"{PREFIX}log_probs")

    def cp_utils(self) -> Any:
        from slime.backends.megatron_utils import cp_utils  # type: ignore[import-not-found]

        return cp_utils

    def cut(self, args: Any, data: Data, rows: Sequence[Tensor]) -> list[Tensor]:
        lengths = zip(rows, data["total_lengths"], data["response_lengths"], strict=True)
        return [
            self.cp_utils().slice_log_prob_with_cp(row, total, response) for row, total, response in lengths
        ]
