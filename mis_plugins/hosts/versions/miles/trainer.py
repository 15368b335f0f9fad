"""The trainer of Miles; through Ray it asks the rollouts' own process which tokens wait to be scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.rollout_data import TRAINER
from mis_plugins.hosts.versions.miles.shelf import waiting
from mis_plugins.hosts.versions.settings import LOGLINEAR
from mis_plugins.hosts.versions.shelf import Waiting
from mis_plugins.hosts.versions.trainer import PREFIX, Data, Split


class MilesTrainer:
    title = "Miles 31f1ca9"
    actor = TRAINER
    model = "miles.backends.megatron_utils.model"
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

    def group(self) -> Any:
        from miles.utils.distributed_utils import get_gloo_group  # type: ignore[import-not-found]

        return get_gloo_group()

    def waiting(self, actor: Any, version: int, trained: int) -> Waiting:
        import ray  # type: ignore[import-not-found]

        return ray.get(actor.rollout_manager.__ray_call__.remote(waiting, version, trained))

    def split(self, actor: Any) -> Split:
        state = _state()
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
        from miles.backends.training_utils.data import DataIterator  # type: ignore[import-not-found]
        from miles.utils.replay_base import all_replay_managers  # type: ignore[import-not-found]

        stages = [manager.stage for manager in all_replay_managers]
        actor._set_replay_stage("fallthrough")
        if actor._active_model_tag != "actor":
            actor._switch_model("actor")
        iterators = [
            DataIterator(data, micro_batch_indices=micro_batches) for _ in range(_state().vpp_size or 1)
        ]
        found = actor.compute_log_prob(
            iterators, [len(micro_batches)], rollout_id=rollout_id, store_prefix=PREFIX
        )
        for manager, stage in zip(all_replay_managers, stages, strict=True):
            manager.stage = stage
        return found.get(f"{PREFIX}log_probs")

    def cp_utils(self) -> Any:
        from miles.backends.training_utils import cp_utils  # type: ignore[import-not-found]

        return cp_utils

    def cut(self, args: Any, data: Data, rows: Sequence[Tensor]) -> list[Tensor]:
        padded = data.get("max_seq_lens") or [None] * len(rows)
        lengths = zip(rows, data["total_lengths"], data["response_lengths"], padded, strict=True)
        return [
            self.cp_utils().slice_log_prob_with_cp(row, total, response, args.qkv_format, longest)
            for row, total, response, longest in lengths
        ]


def _state() -> Any:
    from miles.backends.training_utils.parallel import get_parallel_state  # type: ignore[import-not-found]

    return get_parallel_state()
