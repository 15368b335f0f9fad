"""What our hooks need of Miles. Miles 31f1ca9 of August 2026 has the last address of each need, autumn's the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mis_plugins.hosts.needs import record
from mis_plugins.hosts.needs.record import CARRY, CONVERT, GENERATE, TIS, Need

TRAINING, MEGATRON = "miles.backends.training_utils", "miles.backends.megatron_utils"
ACTOR = f"{MEGATRON}.actor:MegatronTrainRayActor"
ENDPOINT = "miles.rollout.generate_utils.generate_endpoint_utils"
SEQUENCES = ("unconcat_tokens", "total_lengths", "response_lengths", "max_seq_lens")
FSDP = "compute_mis_weights_fsdp"
ON_GROUPS = (
    "policy_loss",
    *record.ROLLOUT_HOOKS,
    "report_step",
    "kept_token_mean",
    *CARRY,
    record.BITWISE_LOSS,
)


def _need(what: str, hooks: tuple[str, ...], *at: str, **more: Any) -> Need:
    return Need("Miles", what, hooks, at, **more)


def _loss(name: str) -> tuple[str, str]:
    """The addresses of a name of the loss, which moved from `loss_hub` to `loss.hub`."""
    return f"{TRAINING}.loss.hub.{name}", f"{TRAINING}.loss_hub.{name}"


@dataclass(frozen=True)
class Miles:
    """The needs by name; the adapter of Miles and its versions' hooks read them from here alone."""

    tis_call: Need = _need(
        "the call of the TIS hook",
        ("compute_mis_weights_with_cp", FSDP),
        *_loss("losses:policy_loss_function"),
        hands=(*TIS, "parallel_state", "max_seq_lens"),
    )
    parallel: Need = _need("its process groups", ON_GROUPS, f"{TRAINING}.parallel:get_parallel_state")
    tracking: Need = _need(
        "its tracker",
        ("report_step",),
        "miles.utils.tracking_utils.tracking:log",
        parameters=("args", "metrics", "step_key"),
    )
    scores: Need = _need(
        "log-probs of the sampled tokens",
        ("policy_loss",),
        *_loss("logit_processors:get_log_probs_and_entropy"),
        parameters=("logits", "args", *SEQUENCES, "with_entropy", "entropy_requires_grad"),
    )
    own_loss: Need = _need(
        "its policy loss",
        (record.BITWISE_LOSS,),
        *_loss("losses:policy_loss_function"),
        parameters=("args", "batch", "logits", "sum_of_sample_mean"),
    )
    log_probs: Need = _need(
        "its formula of log-probs",
        (record.BITWISE_INIT,),
        *_loss("math_utils:compute_log_probs"),
        parameters=("logits", "tokens", "process_group"),
    )
    responses: Need = _need(
        "the logits of each response",
        (record.BITWISE_INIT,),
        *_loss("logit_processors:get_responses"),
        parameters=("logits", "args", *SEQUENCES),
    )
    log_probs_and_entropy: Need = _need(
        "its log-softmax",
        (record.BITWISE_INIT,),
        *_loss("logit_processors:calculate_log_probs_and_entropy"),
        parameters=("logits", "tokens", "tp_group", "true_on_policy"),
    )
    train_actor: Need = _need(
        "the frame of the trainer that holds the rollout batch",
        (*record.ROLLOUT_HOOKS, *CARRY),
        f"{ACTOR}._train_actor",
        f"{ACTOR}.train_actor",
        parameters=("self", "rollout_id", "rollout_data"),
        holds=("data_iterator", "num_microbatches"),
    )
    log_prob_pass: Need = _need(
        "the trainer's log-prob pass",
        (*record.ROLLOUT_HOOKS, *CARRY),
        f"{ACTOR}._compute_log_prob",
        f"{ACTOR}.compute_log_prob",
        parameters=("self", "data_iterator", "num_microbatches", "rollout_id", "store_prefix"),
    )
    init: Need = _need(
        "the frame of the trainer that calls the init hook",
        CARRY,
        f"{ACTOR}.init",
        parameters=("self", "args", "role"),
    )
    weight_version: Need = _need(
        "the version of the trainer's weights",
        CARRY,
        f"{ACTOR}._get_actor_weight_version",
        f"{ACTOR}.weight_updater",
    )
    replay_stage: Need = _need(
        "the switch of its replays", CARRY, f"{ACTOR}._set_replay_stage", parameters=("self", "stage")
    )
    active_model: Need = _need("the tag of the weights in use", CARRY, f"{ACTOR}._active_model_tag")
    switch_model: Need = _need(
        "the switch of weights", CARRY, f"{ACTOR}._switch_model", parameters=("self", "target_tag")
    )
    get_batch: Need = _need(
        "the micro-batch of a train step",
        CARRY,
        f"{MEGATRON}.model:get_batch",
        parameters=("data_iterator", "keys"),
    )
    iterator: Need = _need(
        "its iterator over micro-batches",
        CARRY,
        f"{TRAINING}.data.rollout:DataIterator",
        f"{TRAINING}.data:DataIterator",
        parameters=("rollout_data", "micro_batch_indices"),
    )
    replay_managers: Need = _need("its replays", CARRY, "miles.utils.replay_base:all_replay_managers")
    routing_replay: Need = _need(
        "the replay of routes", record.ROUTES, "miles.utils.replay_base:routing_replay_manager"
    )
    conversion: Need = _need(
        "its conversion of samples to train data",
        CONVERT,
        "miles.ray.rollout.train_data_conversion:convert_samples_to_train_data",
        parameters=(
            "args",
            "samples",
            "metadata",
            "custom_convert_samples_to_train_data_func",
            "custom_reward_post_process_func",
        ),
    )
    single_turn: Need = _need(
        "its single-turn generation",
        GENERATE,
        "miles.rollout.generate_hub.single_turn:generate",
        parameters=("input",),
    )
    prompt_ids: Need = _need(
        "the tokens of a prompt",
        GENERATE,
        f"{ENDPOINT}:compute_prompt_ids_from_sample",
        parameters=("state", "sample"),
    )
    payload: Need = _need(
        "the request for a response",
        GENERATE,
        f"{ENDPOINT}:compute_request_payload",
        parameters=("args", "input_ids", "sampling_params", "multimodal_inputs"),
    )
    headers: Need = _need(
        "the headers of a request",
        GENERATE,
        f"{ENDPOINT}:compute_routing_headers",
        parameters=("args", "sample"),
    )
    update_sample: Need = _need(
        "the sample's update by a response",
        GENERATE,
        f"{ENDPOINT}:update_sample_from_response",
        parameters=("args", "sample", "payload", "output"),
    )


NEEDS = Miles()
