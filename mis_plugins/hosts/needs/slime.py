"""What our hooks need of slime, and of vime, whose modules are slime's under another package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mis_plugins.hosts.needs import record
from mis_plugins.hosts.needs.record import CARRY, CONVERT, GENERATE, TIS, Need


@dataclass(frozen=True)
class SlimeLike:
    """The needs, by name, of slime and of hosts that are made from it."""

    tis_call: Need
    tracking: Need
    scores: Need
    own_loss: Need
    train_actor: Need
    log_prob_pass: Need
    routing_replay: Need


@dataclass(frozen=True)
class Slime(SlimeLike):
    """The needs that slime alone answers: sets that top-p kept, and versions of tokens."""

    kept_sets: Need
    log_probs: Need
    init: Need
    weight_version: Need
    active_model: Need
    switch_model: Need
    parallel_config: Need
    get_batch: Need
    iterator: Need
    conversion: Need
    generation: Need


def _shared(title: str, package: str, *trackings: str) -> dict[str, Need]:
    backend = f"{package}.backends.megatron_utils"
    actor = f"{backend}.actor:MegatronTrainRayActor"

    def need(what: str, hooks: tuple[str, ...], *at: str, **more: Any) -> Need:
        return Need(title, what, hooks, at, **more)

    return {
        "tis_call": need(
            "the call of the TIS hook",
            ("compute_mis_weights_with_cp",),
            f"{backend}.loss:policy_loss_function",
            hands=TIS,
        ),
        "tracking": need(
            "its tracker",
            ("report_step",),
            *(f"{module}:log" for module in trackings),
            parameters=("args", "metrics", "step_key"),
            ran=0,
        ),
        "scores": need(
            "log-probs of the sampled tokens",
            ("policy_loss",),
            f"{backend}.loss:get_log_probs_and_entropy",
            parameters=(
                "logits",
                "args",
                "unconcat_tokens",
                "total_lengths",
                "response_lengths",
                "with_entropy",
            ),
        ),
        "own_loss": need(
            "its policy loss",
            (record.BITWISE_LOSS,),
            f"{backend}.loss:policy_loss_function",
            parameters=("args", "batch", "logits", "sum_of_sample_mean"),
        ),
        "train_actor": need(
            "the frame of the trainer that calls the rollout-data hook",
            (*record.ROLLOUT_HOOKS, *CARRY),
            f"{actor}.train_actor",
            parameters=("self", "rollout_id", "rollout_data"),
            holds=("data_iterator", "num_microbatches"),
        ),
        "log_prob_pass": need(
            "the trainer's log-prob pass",
            (*record.ROLLOUT_HOOKS, *CARRY),
            f"{actor}.compute_log_prob",
            parameters=("self", "data_iterator", "num_microbatches", "store_prefix"),
        ),
        "routing_replay": need(
            "the replay of routes", record.ROUTES, f"{package}.utils.routing_replay:RoutingReplay"
        ),
    }


def _alone() -> dict[str, Need]:
    backend = "slime.backends.megatron_utils"
    actor = f"{backend}.actor:MegatronTrainRayActor"

    def need(what: str, hooks: tuple[str, ...], at: str, **more: Any) -> Need:
        return Need("slime", what, hooks, (at,), **more)

    return {
        "kept_sets": need(
            "the tokens that top-p left",
            ("policy_loss",),
            f"{backend}.loss:get_rollout_top_p_logprob_kwargs",
            parameters=("args", "batch"),
        ),
        "log_probs": need(
            "its formula of log-probs",
            (record.BITWISE_INIT,),
            "slime.utils.ppo_utils:_calculate_log_probs_and_entropy_chunk",
            parameters=("logits", "tokens", "tp_group", "with_entropy", "log_prob_keep_mask"),
        ),
        "init": need(
            "the frame of the trainer that calls the init hook",
            CARRY,
            f"{actor}.init",
            parameters=("self", "args", "role"),
        ),
        "weight_version": need("the version of the trainer's weights", CARRY, f"{actor}.weight_updater"),
        "active_model": need("the tag of the weights in use", CARRY, f"{actor}._active_model_tag"),
        "switch_model": need(
            "the switch of weights", CARRY, f"{actor}._switch_model", parameters=("self", "target_tag")
        ),
        "parallel_config": need("its parallel sizes", CARRY, f"{actor}.train_parallel_config"),
        "get_batch": need(
            "the micro-batch of a train step",
            CARRY,
            f"{backend}.model:get_batch",
            parameters=("data_iterator", "keys"),
        ),
        "iterator": need(
            "its iterator over micro-batches",
            CARRY,
            f"{backend}.data:DataIterator",
            parameters=("rollout_data", "micro_batch_indices"),
        ),
        "conversion": need(
            "its conversion of samples to train data",
            CONVERT,
            "slime.ray.rollout:RolloutManager._convert_samples_to_train_data",
            parameters=("self", "samples"),
        ),
        "generation": need(
            "its generation of one response",
            GENERATE,
            "slime.rollout.sglang_rollout:generate",
            parameters=("args", "sample", "sampling_params"),
        ),
    }


SLIME = Slime(
    **_shared("slime", "slime", "slime.observability.logging_utils", "slime.utils.logging_utils"), **_alone()
)
VIME = SlimeLike(**_shared("vime", "vime", "vime.utils.logging_utils"))
