"""Miles: what our hooks need of it, and how its hooks are answered.

Miles 31f1ca9 of August 2026 has the last address of each need, autumn's the first. It hands its `parallel_state` to the
hook; under fault tolerance Megatron's own data-parallel group is wrong.
"""

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from mis_plugins.config.view import BACKENDS
from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts import host, megatron, needs
from mis_plugins.hosts.host import OWN_HEAD_FLAGS, VERSION_FLAGS, Batch, Host, Parallel, Ranks, sequences_of
from mis_plugins.hosts.needs import CARRY, GENERATE, LOGLINEAR, Need, Refusal, VersionNeeds, asked

TRAINING, MEGATRON = "miles.backends.training_utils", "miles.backends.megatron_utils"
HUB, ACTOR = f"{TRAINING}.loss.hub", f"{MEGATRON}.actor:MegatronTrainRayActor"
ENDPOINT = "miles.rollout.generate_utils.generate_endpoint_utils"
LOGITS, FSDP = "logit_processors", ("compute_mis_weights_fsdp",)
NOT_CONVERTED = ("use_dynamic_global_batch_size", "multi_lora")
ON_GROUPS = (*(*needs.LOSS, *needs.ROLLOUT, *needs.STEP, "kept_token_mean"), *(*CARRY, *needs.BITWISE_LOSS))
_need = partial(needs.placed, "Miles")


def _loss(name: str) -> tuple[str, str]:
    """The addresses of a name of the loss, which moved from `loss_hub` to `loss.hub`."""
    return f"{HUB}.{name}", f"{TRAINING}.loss_hub.{name}"


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
            lambda args: (
                args.get("pause_generation_mode") == "in_place" and not args.get("sglang_disable_overlap_schedule")
            ),
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
            lambda args: args.get("rollout_top_p", 1.0) != 1.0 or host.whole_number(args.get("rollout_top_k")) > 0,
            f"--rollout-top-p other than 1, or --rollout-top-k: recompute scores the whole vocabulary; {LOGLINEAR}",
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
            "the logits of each response", (*CARRY, *needs.BITWISE_INIT), f"logits args {needs.SEQUENCES} max_seq_lens"
        ),
        *_loss(f"{LOGITS}:get_responses"),
    )
    log_probs_and_entropy: Need = _need(
        asked("its log-softmax", (*CARRY, *needs.BITWISE_INIT), "logits tokens tp_group true_on_policy"),
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
        asked(
            "the request for a response",
            GENERATE,
            "args input_ids sampling_params multimodal_inputs",
            unasked="keywords",
        ),
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
# Which tokens the engine could have sampled: Miles's keys (its #2595), and slime's, where they reach Miles.
SAMPLING_SUPPORT = (
    "rollout_sampling_mask_ids",
    "rollout_sampling_mask_offsets",
    "rollout_sampling_mask",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
)


def trains_on(backend: str, args: Any) -> bool:
    """Whether Miles trains with this backend in place of Megatron, whichever hook it calls."""
    return getattr(args, "train_backend", None) == backend


def runs(args: Any) -> bool:
    """Whether this process has Miles's groups or tracking, and trains with Megatron."""
    elsewhere = any(trains_on(backend, args) for backend in BACKENDS)
    return not elsewhere and (NEEDS.parallel.is_loaded or NEEDS.tracking.is_loaded)


def parallel() -> Parallel:
    """The groups as they are now: Miles makes new ones when a rank is lost or replaced."""
    state = _state()
    return megatron.parallel() if state is None else megatron.handed(state)


def reports(ranks: Ranks) -> bool:
    """Whether Miles logs on this rank of the last pipeline stage.

    The ranks are those that Miles keeps: under fault tolerance a group is torchft's, whose `rank()` is 0 in each cell.
    """
    state = _state()
    if state is None:
        return megatron.reports(ranks)
    return all(info.rank == 0 for info in (state.cp, state.effective_dp, state.tp))


def scores(args: Any, batch: Batch, logits: host.Tensor) -> host.Scores:
    """Miles's own log-probs, and its entropy where the loss has a term of it or the run observes it.

    Raises:
        InputError: the engine's log-probs are renormalized over a part of the vocabulary.
    """
    _check_whole_vocabulary(args, batch)
    wants_entropy = args.entropy_coef != 0 or args.observe_training_entropy
    by_name = NEEDS.scores.get()(
        logits,
        args=args,
        with_entropy=wants_entropy,
        entropy_requires_grad=args.entropy_coef != 0,
        max_seq_lens=batch.get("max_seq_lens"),
        **sequences_of(batch),
    )
    return by_name["log_probs"], by_name.get("entropy")


def recomputes(args: Any) -> host.Recomputes:
    """Miles recomputes log-probs before each update unless its arguments skip that."""
    return "never" if args.skip_actor_forward_only else "always"


def hands_on_kept_sets(keys: Mapping[str, Any]) -> bool:
    """Whether our three hooks of versions have the engine return kept sets and the trainer score over them."""
    words = VERSION_FLAGS.split()
    ours = zip(words[::2], words[1::2], strict=True)
    bounded = host.whole_number(keys.get("rollout_top_k")) > 0
    return bounded and all(keys.get(flag[2:].replace("-", "_")) == path for flag, path in ours)


def _check_whole_vocabulary(args: Any, batch: Batch) -> None:
    """Refuse log-probs of the engine that are renormalized over what top-p or top-k left of the vocabulary."""
    held = {name: batch[name] for name in SAMPLING_SUPPORT if batch.get(name) is not None}
    carried = [name for name, rows in held.items() if any(row is not None for row in rows)]
    if getattr(args, "use_sampling_support_replay", False):
        carried.append("use_sampling_support_replay")
    if carried:
        raise InputError(
            f"{carried[0]}: rollout_log_probs are renormalized over the tokens that top-p or top-k left, and "
            "mis_plugins.mis.policy_loss does not score over these of Miles; give our hooks of docs/hooks.md, or "
            "--rollout-top-p 1 and --rollout-top-k -1"
        )


def _state() -> Any | None:
    """The `parallel_state` of Miles as it is now; None where this process has not loaded it."""
    get_parallel_state = NEEDS.parallel.loaded()
    return None if get_parallel_state is None else get_parallel_state()


HOST = Host(
    name="miles",
    title="Miles",
    package="miles",
    runs=runs,
    parallel=parallel,
    scores=scores,
    recomputes=recomputes,
    own_loss=NEEDS.own_loss.get,
    reports=reports,
    tracking=NEEDS.tracking.loaded,
    needs=NEEDS,
    one_sample_a_rollout=True,
    records=("miles", "megatron", "sglang"),
    eval_engines=True,
    version_flags=f"--fully-async {VERSION_FLAGS}",
    head_flags=f"{OWN_HEAD_FLAGS} (Miles of autumn 2026), or {VERSION_FLAGS}",
    rollout_batch=True,
    kept_set=hands_on_kept_sets,
    rescore=partial(megatron.rescore, NEEDS),
)
