"""slime: what our hooks need of it, and how its hooks are answered.

It hands a hook no groups: they are Megatron's own. Hosts that are made from slime are served alike.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from mis_plugins.errors import ConfigError
from mis_plugins.hosts import megatron, needs
from mis_plugins.hosts.host import VERSION_FLAGS, Batch, Host, Scores, Tensor, sequences_of
from mis_plugins.hosts.needs import LOGLINEAR, Need, Needs, Refusal, VersionNeeds, asked

BACKEND = "slime.backends.megatron_utils"
ACTOR = f"{BACKEND}.actor:MegatronTrainRayActor"
STAGE = "ROUTING_REPLAY_STAGE"
OWN_CONVERSION = "custom_convert_samples_to_train_data_func"
_need = partial(needs.placed, "slime")


@dataclass(frozen=True)
class Slime(VersionNeeds):
    """The needs by name. slime pauses by `abort` alone, so that no engine writes on while an update is under way."""

    commit: ClassVar[str] = "slime 624b824"
    notes: ClassVar[str] = "source_names"
    refusals: ClassVar[tuple[Refusal, ...]] = (
        Refusal(
            lambda args: args.get("release_train"),
            f"--release-train: what was scored ends with the trainer; {LOGLINEAR}",
            scored=True,
        ),
        Refusal(
            lambda args: args.get("rollout_top_p", 1.0) != 1.0,
            f"--rollout-top-p other than 1: recompute scores the whole vocabulary; {LOGLINEAR}",
            scored=True,
        ),
    )

    tis_call: Need = _need("tis_call", f"{BACKEND}.loss:policy_loss_function")
    tracking: Need = _need("tracking", "slime.observability.logging_utils:log", "slime.utils.logging_utils:log", ran=0)
    scores: Need = _need("scores", f"{BACKEND}.loss:get_log_probs_and_entropy")
    own_loss: Need = _need("own_loss", f"{BACKEND}.loss:policy_loss_function")
    train_actor: Need = _need("train_actor", f"{ACTOR}.train_actor")
    log_prob_pass: Need = _need("log_prob_pass", f"{ACTOR}.compute_log_prob")
    routing_replay: Need = _need("routing_replay", "slime.utils.routing_replay:RoutingReplay")
    kept_sets: Need = _need(
        asked("the tokens that top-p left", needs.LOSS, "args batch"),
        f"{BACKEND}.loss:get_rollout_top_p_logprob_kwargs",
    )
    log_probs: Need = _need(
        "log_probs",
        "slime.utils.ppo_utils:_calculate_log_probs_and_entropy_chunk",
        takes="tp_group with_entropy log_prob_keep_mask",
    )
    init: Need = _need("init", f"{ACTOR}.init")
    weight_version: Need = _need("weight_version", f"{ACTOR}.weight_updater")
    active_model: Need = _need("active_model", f"{ACTOR}._active_model_tag")
    switch_model: Need = _need("switch_model", f"{ACTOR}._switch_model")
    parallel_config: Need = _need(asked("its parallel sizes", needs.CARRY), f"{ACTOR}.train_parallel_config")
    get_batch: Need = _need("get_batch", f"{BACKEND}.model:get_batch")
    iterator: Need = _need("iterator", f"{BACKEND}.data:DataIterator")
    conversion: Need = _need(
        "conversion", "slime.ray.rollout:RolloutManager._convert_samples_to_train_data", takes="self samples"
    )
    generation: Need = _need(
        asked("its generation of one response", needs.GENERATE, "args sample sampling_params"),
        "slime.rollout.sglang_rollout:generate",
    )
    post: Need = _need(
        asked("the request of its generation", needs.GENERATE, "url payload"), "slime.rollout.sglang_rollout:post"
    )

    def version_of(self, actor: Any) -> int:
        return int(self.weight_version.of(actor).weight_version)

    def virtual_pipeline(self, actor: Any) -> tuple[int, int]:
        config = self.parallel_config.of(actor)
        return config["vpp_size"], config["microbatch_group_size_per_vp_stage"]

    @contextmanager
    def own_routes(self, actor: Any) -> Iterator[None]:
        if getattr(actor.args, "use_routing_replay", False):
            os.environ[STAGE] = "fallthrough"  # the host sets its own before each of its passes
        yield

    def own_conversion(self, args: Any) -> Callable[[Sequence[Any]], dict[str, Any]]:
        manager = self.conversion.frame().get("self")
        if manager is None:
            raise ConfigError(
                "--custom-convert-samples-to-train-data-path mis_plugins.mis.convert_with_versions: not called by "
                f"slime's RolloutManager; give it there, with {self.commit}"
            )

        def convert(samples: Sequence[Any]) -> dict[str, Any]:
            hook = getattr(manager, OWN_CONVERSION)
            setattr(manager, OWN_CONVERSION, None)  # so that the method converts by itself
            try:
                return self.conversion.of(manager)(samples)
            finally:
                setattr(manager, OWN_CONVERSION, hook)

        return convert


SLIME = Slime()
FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def hands_on_kept_sets(keys: Mapping[str, Any]) -> bool:
    """Whether slime asks its engine for the tokens that it samples from: by top-p alone, whatever top-k says."""
    return keys.get("rollout_top_p", 1) != 1


def scores(args: Any, batch: Batch, logits: Tensor) -> Scores:
    """slime's own log-probs, over the tokens that top-p left, and its entropy, of the whole vocabulary."""
    return scored(SLIME, args, batch, logits, SLIME.kept_sets.get()(args, batch))


def scored(table: Needs, args: Any, batch: Batch, logits: Tensor, more: Mapping[str, Any] | None = None) -> Scores:
    """Log-probs and entropy by the host's own function, which returns them behind an empty tensor."""
    _, by_name = table.scores.get()(logits, args=args, with_entropy=True, **sequences_of(batch), **(more or {}))
    return by_name["log_probs"], by_name["entropy"]


def tracks(table: Needs) -> Callable[[Any], bool]:
    """Whether this process has the host's tracking, whatever its arguments say."""
    return lambda args: table.tracking.is_loaded


HOST = Host(
    name="slime",
    title="slime",
    package="slime",
    runs=tracks(SLIME),
    parallel=megatron.parallel,
    scores=scores,
    own_loss=SLIME.own_loss.get,
    reports=megatron.reports,
    tracking=SLIME.tracking.loaded,
    needs=SLIME,
    one_sample_a_rollout=True,
    records=("slime", "megatron", "sglang"),
    version_flags=f"{FULLY_ASYNC} {VERSION_FLAGS}",
    head_flags=VERSION_FLAGS,
    rollout_batch=True,
    kept_set=hands_on_kept_sets,
    rescore=partial(megatron.rescore, SLIME),
)
