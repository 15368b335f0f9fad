"""The trainer of Miles, by the needs that its adapter names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.adapters import miles
from mis_plugins.hosts.host import Parallel
from mis_plugins.hosts.needs.miles import NEEDS
from mis_plugins.hosts.versions.settings import LOGLINEAR
from mis_plugins.hosts.versions.trainer import PREFIX, Data, Split


class MilesTrainer:
    title = "Miles 31f1ca9"
    needs = NEEDS
    notes = "weight_versions"
    cannot: Mapping[str, str] = {"multi_lora": "each adapter then has versions of its own"}

    def check(self, args: Any, recomputes: bool) -> None:
        """SGLang names a token by the version at its arrival, and an overlapped step arrives after the update."""
        overlapped = not getattr(args, "sglang_disable_overlap_schedule", False)
        if getattr(args, "pause_generation_mode", None) == "in_place" and overlapped:
            raise ConfigError(
                "--pause-generation-mode in_place: with SGLang's overlapped schedule the first token after an update "
                "counts as the new version's; give --sglang-disable-overlap-schedule, or pause by retract"
            )
        if getattr(args, "indep_dp", False):
            raise ConfigError(
                "--ft-components train: one cell alone hands new weights to the engines, and trainers of the others do "
                "not know their version; leave it out, or the init hook"
            )
        if recomputes and getattr(args, "qkv_format", "thd") != "thd":
            raise ConfigError(
                f"--qkv-format {args.qkv_format}: recompute scores packed sequences alone; {LOGLINEAR}"
            )

    def parallel(self) -> Parallel:
        return miles.parallel()

    def weight_version(self, actor: Any) -> int:
        """The newest Miles tells it by a method; before, the updater of the weights holds it."""
        told = NEEDS.weight_version.of(actor)
        return told() if inspect.ismethod(told) else told.weight_version

    def split(self, actor: Any) -> Split:
        state = NEEDS.parallel.get()()
        return Split(
            budget=(actor.args.max_tokens_per_gpu or 1) * state.cp.size,
            ranks=state.effective_dp.size,
            rank=state.effective_dp.rank,
            multiple=state.microbatch_group_size_per_vp_stage if (state.vpp_size or 1) > 1 else 1,
            answers=state.tp.rank == state.cp.rank == 0,
        )

    def log_probs(
        self, actor: Any, rollout_id: int, data: Data, micro_batches: Sequence[list[int]]
    ) -> Sequence[Tensor] | None:
        managers, iterator = NEEDS.replay_managers.get(), NEEDS.iterator.get()
        stages = [manager.stage for manager in managers]
        NEEDS.replay_stage.of(actor)("fallthrough")
        if NEEDS.active_model.of(actor) != "actor":
            NEEDS.switch_model.of(actor)("actor")
        number = NEEDS.parallel.get()().vpp_size or 1
        iterators = [iterator(data, micro_batch_indices=micro_batches) for _ in range(number)]
        found = NEEDS.log_prob_pass.of(actor)(
            iterators, [len(micro_batches)], rollout_id=rollout_id, store_prefix=PREFIX
        )
        for manager, stage in zip(managers, stages, strict=True):
            manager.stage = stage
        return found.get(f"{PREFIX}log_probs")
