"""What our hooks need of Miles. Miles 31f1ca9 of August 2026 has the last address of each need, autumn's the first."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.needs import record
from mis_plugins.hosts.needs.record import CARRY, GENERATE, LOGLINEAR, Need, Refusal, VersionNeeds, asked

TRAINING, MEGATRON = "miles.backends.training_utils", "miles.backends.megatron_utils"
HUB, ACTOR = f"{TRAINING}.loss.hub", f"{MEGATRON}.actor:MegatronTrainRayActor"
ENDPOINT = "miles.rollout.generate_utils.generate_endpoint_utils"
LOGITS, FSDP = "logit_processors", ("compute_mis_weights_fsdp",)
NOT_CONVERTED = ("use_dynamic_global_batch_size", "multi_lora")
ON_GROUPS = (*(*record.LOSS, *record.ROLLOUT, *record.STEP, "kept_token_mean"), *(*CARRY, *record.BITWISE_LOSS))
_need = partial(record.placed, "Miles")


def _loss(name: str) -> tuple[str, str]:
    """The addresses of a name of the loss, which moved from `loss_hub` to `loss.hub`."""
    return f"{HUB}.{name}", f"{TRAINING}.loss_hub.{name}"


def _overlaps(args: Any) -> bool:
    return args.get("pause_generation_mode") == "in_place" and not args.get("sglang_disable_overlap_schedule")


@dataclass(frozen=True)
class Miles(VersionNeeds):
    """The needs by name; the adapter of Miles and its versions' hooks read them from here alone."""

    commit: ClassVar[str] = "Miles 31f1ca9"
    notes: ClassVar[str] = "weight_versions"
    asks_for_head: ClassVar[str] = "rollout_top_logprobs_num"
    keeps_sets: ClassVar[bool] = True
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            lambda args: args.get("multi_lora"), "--multi-lora: each adapter then has versions of its own; drop it"
        ),
        Refusal(  # SGLang names a token by the version at its arrival
            _overlaps,
            "--pause-generation-mode in_place: with SGLang's overlapped schedule the first token after an update "
            "counts as the new version's; give --sglang-disable-overlap-schedule, or pause by retract",
        ),
        Refusal(
            lambda args: args.get("indep_dp"),
            "--ft-components train: one cell alone hands new weights to the engines, and trainers of the others do "
            "not know their version; drop it",
        ),
        Refusal(
            lambda args: args.get("qkv_format", "thd") != "thd",
            f"--qkv-format bshd: recompute scores packed sequences alone; {LOGLINEAR}",
            scored=True,
        ),
        Refusal(
            lambda args: args.get("rollout_top_p", 1.0) != 1.0 or args.get("rollout_top_k", -1) > 0,
            f"--rollout-top-p below 1, or --rollout-top-k: recompute scores the whole vocabulary; {LOGLINEAR}",
            scored=True,
        ),
    )

    tis_call: Need = _need(
        "tis_call", *_loss("losses:policy_loss_function"), hands="parallel_state max_seq_lens", serves=FSDP
    )
    parallel: Need = _need(asked("its process groups", ON_GROUPS), f"{TRAINING}.parallel:get_parallel_state")
    tracking: Need = _need("tracking", "miles.utils.tracking_utils.tracking:log")
    scores: Need = _need(
        "scores", *_loss(f"{LOGITS}:get_log_probs_and_entropy"), takes="max_seq_lens entropy_requires_grad"
    )
    own_loss: Need = _need("own_loss", *_loss("losses:policy_loss_function"))
    log_probs: Need = _need("log_probs", *_loss("math_utils:compute_log_probs"), takes="process_group")
    responses: Need = _need(
        asked(
            "the logits of each response",
            (*CARRY, *record.BITWISE_INIT),
            f"logits args {record.SEQUENCES} max_seq_lens",
        ),
        *_loss(f"{LOGITS}:get_responses"),
    )
    log_probs_and_entropy: Need = _need(
        asked("its log-softmax", (*CARRY, *record.BITWISE_INIT), "logits tokens tp_group true_on_policy"),
        *_loss(f"{LOGITS}:calculate_log_probs_and_entropy"),
    )
    train_actor: Need = _need("train_actor", f"{ACTOR}._train_actor", f"{ACTOR}.train_actor")
    log_prob_pass: Need = _need(
        "log_prob_pass", f"{ACTOR}._compute_log_prob", f"{ACTOR}.compute_log_prob", takes="rollout_id"
    )
    init: Need = _need("init", f"{ACTOR}.init")
    weight_version: Need = _need("weight_version", f"{ACTOR}._get_actor_weight_version", f"{ACTOR}.weight_updater")
    replay_stage: Need = _need(asked("the switch of its replays", CARRY, "self stage"), f"{ACTOR}._set_replay_stage")
    active_model: Need = _need("active_model", f"{ACTOR}._active_model_tag")
    switch_model: Need = _need("switch_model", f"{ACTOR}._switch_model")
    get_batch: Need = _need("get_batch", f"{MEGATRON}.model:get_batch")
    iterator: Need = _need("iterator", f"{TRAINING}.data.rollout:DataIterator", f"{TRAINING}.data:DataIterator")
    replay_managers: Need = _need(asked("its replays", CARRY), "miles.utils.replay_base:all_replay_managers")
    routing_replay: Need = _need("routing_replay", "miles.utils.replay_base:routing_replay_manager")
    conversion: Need = _need(
        "conversion",
        "miles.ray.rollout.train_data_conversion:convert_samples_to_train_data",
        takes="args samples metadata custom_convert_samples_to_train_data_func custom_reward_post_process_func",
    )
    single_turn: Need = _need(
        asked("its single-turn generation", GENERATE, "input"), "miles.rollout.generate_hub.single_turn:generate"
    )
    prompt_ids: Need = _need(
        asked("the tokens of a prompt", GENERATE, "state sample"), f"{ENDPOINT}:compute_prompt_ids_from_sample"
    )
    payload: Need = _need(
        asked("the request for a response", GENERATE, "args input_ids sampling_params multimodal_inputs"),
        f"{ENDPOINT}:compute_request_payload",
    )
    headers: Need = _need(
        asked("the headers of a request", GENERATE, "args sample"), f"{ENDPOINT}:compute_routing_headers"
    )
    update_sample: Need = _need(
        asked("the sample's update by a response", GENERATE, "args sample payload output"),
        f"{ENDPOINT}:update_sample_from_response",
    )

    def version_of(self, actor: Any) -> int:
        version = self.weight_version.of(actor)
        return version() if inspect.ismethod(version) else version.weight_version

    def virtual_pipeline(self, actor: Any) -> tuple[int, int]:
        state = self.parallel.get()()
        chunks = state.vpp_size or 1
        return chunks, state.microbatch_group_size_per_vp_stage if chunks > 1 else 1

    @contextmanager
    def own_routes(self, actor: Any) -> Iterator[None]:
        managers = self.replay_managers.get()
        stages = [manager.stage for manager in managers]
        self.replay_stage.of(actor)("fallthrough")
        try:
            yield
        finally:
            for manager, stage in zip(managers, stages, strict=True):
                manager.stage = stage

    def own_conversion(self, args: Any) -> Callable[[Sequence[Any]], dict[str, Any]]:
        for name in NOT_CONVERTED:
            if getattr(args, name, False):
                raise ConfigError(
                    f"--{name.replace('_', '-')}: Miles hands what it needs to its own conversion alone, so versions "
                    "cannot be carried; leave it out, or --custom-convert-samples-to-train-data-path"
                )
        path = args.custom_reward_post_process_path
        rewards = None if path is None else pkgutil.resolve_name(path)
        return lambda samples: self.conversion.get()(args, samples, {}, None, rewards)


NEEDS = Miles()
