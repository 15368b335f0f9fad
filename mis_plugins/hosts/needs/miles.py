"""What our hooks need of Miles. Miles 31f1ca9 of August 2026 has the last address of each need, autumn's the first."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.needs import record
from mis_plugins.hosts.needs.record import CARRY, GENERATE, LOGLINEAR, Need, Refusal, VersionNeeds

TRAINING, MEGATRON = "miles.backends.training_utils", "miles.backends.megatron_utils"
HUB, ACTOR = f"{TRAINING}.loss.hub", f"{MEGATRON}.actor:MegatronTrainRayActor"
ENDPOINT = "miles.rollout.generate_utils.generate_endpoint_utils"
SEQUENCES = "unconcat_tokens total_lengths response_lengths max_seq_lens"
NOT_CONVERTED = ("use_dynamic_global_batch_size", "multi_lora")
ON_GROUPS = (
    *(*record.LOSS, *record.ROLLOUT, *record.STEP, "kept_token_mean"),
    *(*CARRY, *record.BITWISE_LOSS),
)
_need = record.table("Miles")


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
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            lambda args: args.get("multi_lora"),
            "--multi-lora: each adapter then has versions of its own; drop it",
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
    )

    tis_call: Need = _need(
        "the call of the TIS hook",
        record.TIS_HOOKS,
        *_loss("losses:policy_loss_function"),
        hands=f"{record.HANDED} parallel_state max_seq_lens",
    )
    parallel: Need = _need("its process groups", ON_GROUPS, f"{TRAINING}.parallel:get_parallel_state")
    tracking: Need = _need(
        "its tracker",
        record.STEP,
        "miles.utils.tracking_utils.tracking:log",
        takes="args metrics step_key",
    )
    scores: Need = _need(
        "log-probs of the sampled tokens",
        record.LOSS,
        *_loss("logit_processors:get_log_probs_and_entropy"),
        takes=f"logits args {SEQUENCES} with_entropy entropy_requires_grad",
    )
    own_loss: Need = _need(
        "its policy loss",
        record.BITWISE_LOSS,
        *_loss("losses:policy_loss_function"),
        takes="args batch logits sum_of_sample_mean",
    )
    log_probs: Need = _need(
        "its formula of log-probs",
        record.BITWISE_INIT,
        *_loss("math_utils:compute_log_probs"),
        takes="logits tokens process_group",
    )
    responses: Need = _need(
        "the logits of each response",
        record.BITWISE_INIT,
        *_loss("logit_processors:get_responses"),
        takes=f"logits args {SEQUENCES}",
    )
    log_probs_and_entropy: Need = _need(
        "its log-softmax",
        record.BITWISE_INIT,
        *_loss("logit_processors:calculate_log_probs_and_entropy"),
        takes="logits tokens tp_group true_on_policy",
    )
    train_actor: Need = _need(
        "the frame of the trainer that holds the rollout batch",
        (*record.ROLLOUT, *CARRY),
        f"{ACTOR}._train_actor",
        f"{ACTOR}.train_actor",
        takes="self rollout_id rollout_data",
        holds="data_iterator num_microbatches",
    )
    log_prob_pass: Need = _need(
        "the trainer's log-prob pass",
        (*record.ROLLOUT, *CARRY),
        f"{ACTOR}._compute_log_prob",
        f"{ACTOR}.compute_log_prob",
        takes="self data_iterator num_microbatches rollout_id store_prefix",
    )
    init: Need = _need(
        "the frame of the trainer that calls the init hook", CARRY, f"{ACTOR}.init", takes="self args role"
    )
    weight_version: Need = _need(
        "the version of the trainer's weights",
        CARRY,
        f"{ACTOR}._get_actor_weight_version",
        f"{ACTOR}.weight_updater",
    )
    replay_stage: Need = _need(
        "the switch of its replays", CARRY, f"{ACTOR}._set_replay_stage", takes="self stage"
    )
    active_model: Need = _need("the tag of the weights in use", CARRY, f"{ACTOR}._active_model_tag")
    switch_model: Need = _need(
        "the switch of weights", CARRY, f"{ACTOR}._switch_model", takes="self target_tag"
    )
    get_batch: Need = _need(
        "the micro-batch of a train step", CARRY, f"{MEGATRON}.model:get_batch", takes="data_iterator keys"
    )
    iterator: Need = _need(
        "its iterator over micro-batches",
        CARRY,
        f"{TRAINING}.data.rollout:DataIterator",
        f"{TRAINING}.data:DataIterator",
        takes="rollout_data micro_batch_indices",
    )
    replay_managers: Need = _need("its replays", CARRY, "miles.utils.replay_base:all_replay_managers")
    routing_replay: Need = _need(
        "the replay of routes", record.ROUTES, "miles.utils.replay_base:routing_replay_manager"
    )
    conversion: Need = _need(
        "its conversion of samples to train data",
        record.CONVERT,
        "miles.ray.rollout.train_data_conversion:convert_samples_to_train_data",
        takes="args samples metadata custom_convert_samples_to_train_data_func custom_reward_post_process_func",
    )
    single_turn: Need = _need(
        "its single-turn generation",
        GENERATE,
        "miles.rollout.generate_hub.single_turn:generate",
        takes="input",
    )
    prompt_ids: Need = _need(
        "the tokens of a prompt",
        GENERATE,
        f"{ENDPOINT}:compute_prompt_ids_from_sample",
        takes="state sample",
    )
    payload: Need = _need(
        "the request for a response",
        GENERATE,
        f"{ENDPOINT}:compute_request_payload",
        takes="args input_ids sampling_params multimodal_inputs",
    )
    headers: Need = _need(
        "the headers of a request", GENERATE, f"{ENDPOINT}:compute_routing_headers", takes="args sample"
    )
    update_sample: Need = _need(
        "the sample's update by a response",
        GENERATE,
        f"{ENDPOINT}:update_sample_from_response",
        takes="args sample payload output",
    )

    def version_of(self, actor: Any) -> int:
        told = self.weight_version.of(actor)
        return told() if inspect.ismethod(told) else told.weight_version

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
