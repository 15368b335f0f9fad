"""The trainer of slime. It pauses by `abort` alone, so that no engine writes on while an update is under way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mis_plugins.errors import ConfigError
from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import Parallel
from mis_plugins.hosts.needs.slime import SLIME
from mis_plugins.hosts.versions.settings import LOGLINEAR
from mis_plugins.hosts.versions.trainer import PREFIX, Data, Split

STAGE = "ROUTING_REPLAY_STAGE"


class SlimeTrainer:
    title = "slime 624b824"
    needs = SLIME
    notes = "source_names"
    cannot: Mapping[str, str] = {}

    def check(self, args: Any, recomputes: bool) -> None:
        if recomputes and getattr(args, "release_train", False):
            raise ConfigError(f"--release-train: what was scored ends with the trainer; {LOGLINEAR}")
        if recomputes and getattr(args, "rollout_top_p", 1.0) != 1.0:
            raise ConfigError(
                f"--rollout-top-p {args.rollout_top_p}: recompute scores the whole vocabulary; {LOGLINEAR}"
            )

    def parallel(self) -> Parallel:
        return megatron.parallel()

    def weight_version(self, actor: Any) -> int:
        return int(SLIME.weight_version.of(actor).weight_version)

    def split(self, actor: Any) -> Split:
        from megatron.core import mpu

        config = SLIME.parallel_config.of(actor)
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
        if getattr(actor.args, "use_routing_replay", False):
            os.environ[STAGE] = "fallthrough"  # the host sets its own before each of its passes
        if SLIME.active_model.of(actor) != "actor":
            SLIME.switch_model.of(actor)("actor")
        iterator, number = SLIME.iterator.get(), SLIME.parallel_config.of(actor)["vpp_size"]
        iterators = [iterator(data, list(micro_batches)) for _ in range(number)]
        found = SLIME.log_prob_pass.of(actor)(iterators, [len(micro_batches)], store_prefix=PREFIX)
        return found.get(f"{PREFIX}log_probs")
