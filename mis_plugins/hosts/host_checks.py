"""Checks before a job, and of the watch over routers: what a host can do, and what spoils a replay of routes."""

from functools import partial

from mis_plugins.config.view import view
from mis_plugins.errors import ConfigError
from mis_plugins.hosts.checks import REPLAY, Check, Given
from mis_plugins.hosts.needs import INIT
from mis_plugins.hosts.ownership import under_another_flag
from mis_plugins.hosts.uncorrected import with_flags


def _chunks_cut(given: Given) -> bool:
    """Whether a prompt may be cut into chunks, or be larger than what SGLang keeps routes of."""
    size, longest = (given.get(key) for key in ("sglang_chunked_prefill_size", "rollout_max_context_len"))
    if not given.replays or not isinstance(size, int):
        return False
    return size <= 0 or not isinstance(longest, int) or size < longest


of_command, of_routes = partial(Check, ("command",)), partial(Check, ("command", "watch"))
VLLM_HEADS = (
    "use vime's own --use-score-centering --score-centering-top-k beside its built-in TIS instead (our generation "
    "hooks ask SGLang for the likeliest tokens, and vime runs vLLM), "
)
REPLAYS = (
    of_routes(
        "fused router",
        lambda given: given.replays and given.has("moe_router_fusion"),
        "moe_router_fusion: the fused router of megatron-core returns before the replay, so that no route of the "
        "engine is used; leave it out with use_rollout_routing_replay",
        arguments=(REPLAY, "moe_router_fusion"),
    ),
    of_routes(
        "replay in the file alone",
        lambda given: given.replays and not given.has("use_routing_replay"),
        "use_rollout_routing_replay: the host derives use_routing_replay before it reads the file, so that the engine "
        "returns its routes and the trainer replays none; give --use-rollout-routing-replay, or set "
        "use_routing_replay: true beside it",
        arguments=(REPLAY, "use_routing_replay"),
    ),
    of_routes(
        "routes not asked",
        lambda given: given.reads_routes and given.get(REPLAY, True) in (False, None),
        "use_rollout_routing_replay: false does not ask the engine for its routes, which statistic: route and "
        "mis.routing compare with; give --use-rollout-routing-replay (and mis.routing.experts: trainer, where routers "
        "shall use their own gates)",
        arguments=(REPLAY,),
    ),
    of_routes(
        "hierarchical cache",
        lambda given: given.replays and given.has("sglang_enable_hierarchical_cache"),
        "sglang_enable_hierarchical_cache: SGLang keeps routes by place in the device cache, and returns those of "
        "other tokens for a prefix that comes back from the host cache (sglang#26975); leave it out with "
        "use_rollout_routing_replay",
        arguments=(REPLAY, "sglang_enable_hierarchical_cache"),
    ),
    of_routes(
        "chunked prefill",
        _chunks_cut,
        "sglang_chunked_prefill_size: at the border of two chunks SGLang up to 0.5.23 can return rows of an earlier "
        "forward (sglang#36404), and with -1 a long prompt stops it (sglang#26860); give rollout_max_context_len, and "
        "a size that is no smaller",
        "warn",
        (REPLAY, "sglang_chunked_prefill_size"),
    ),
    of_routes(
        "speculation",
        lambda given: given.replays and given.has("sglang_speculative_algorithm"),
        "sglang_speculative_algorithm: beside a replay of routes, speculation has raised the difference of log-probs "
        "(miles#1186); compare route_strange and route_kl_k3 with a run without it",
        "warn",
        (REPLAY, "sglang_speculative_algorithm"),
    ),
    of_routes(
        "gate dtype",
        lambda given: (given.replays or given.reads_routes) and given.get("moe_router_dtype") in ("fp32", "fp64"),
        "moe_router_dtype: the trainer computes its gates in it, and SGLang 0.5.23 those of Qwen2-MoE and Qwen3-MoE in "
        "the dtype of the model; leave it out for them, since a replay hands over experts and not their probabilities",
        "warn",
        (REPLAY, "moe_router_dtype"),
    ),
)
NO_ROUTERS = (
    " needs a hook before each log-prob pass, which {host} does not call: nothing can watch its routers; leave it out, "
    "or train with Megatron on Miles or slime"
)
PAUSES = (
    of_command(
        "cache of earlier weights",
        lambda given: given.get("pause_generation_mode") == "in_place" and not given.has("sglang_disable_radix_cache"),
        "pause_generation_mode: in_place keeps the prefix cache over an update of the weights: whatever shares a "
        "prefix is then sampled over keys and values of earlier weights, under the new version's number (miles#2782); "
        "use retract, or give --sglang-disable-radix-cache, unless your Miles keeps a cache for each version "
        "(miles#2783)",
        "warn",
        ("pause_generation_mode", "sglang_disable_radix_cache"),
    ),
)


def _never_called(given: Given) -> list[str]:
    """Arguments that name a hook which the host's trainer does not call."""
    called = {
        "rollout_data_postprocess_path": given.host.rollout_batch,
        BEFORE_STEP: given.host.step_hook,
        "custom_megatron_before_log_prob_hook_path": given.host.routers,
    }
    return [name for name, is_called in called.items() if given.has(name) and not is_called]


BEFORE_STEP = "custom_megatron_before_train_step_hook_path"
BY_DEFAULT = {"advantage_estimator": "grpo", "use_rollout_logprobs": False, "opsm_delta": 1e-4}  # of every host


def _against_flags(given: Given) -> str | None:
    """What the loss hook would raise at its first call: a flag that contradicts the config; None where none does."""
    if not given.in_loss_hook or given.watches or given.get("use_tis") is False:
        return None
    try:
        with_flags(view({**BY_DEFAULT, **given.args}), given.config)
    except ConfigError as error:
        return str(error)
    return None


def _not_carried(given: Given) -> str | None:
    """What `carry_versions` would raise when the trainer starts; None where it raises nothing, or is not called."""
    host = given.host
    if given.get("custom_megatron_init_path") != INIT.split()[-1] or not host.megatron:
        return None
    if not host.version_flags:
        return f"{INIT}: versions are not carried on {host.title}; leave the flag out"
    corrects = given.in_loss_hook and not given.watches and given.get("use_tis") is not False
    segment_wise = given.config.where_versions_are_known().segment_wise if corrects else None
    scored = segment_wise is not None and segment_wise.enabled and segment_wise.method == "recompute"
    return host.needs.refused(given.args, scored)


NOT_SKIPPED = ("rollout_data_postprocess_path", "custom_megatron_before_log_prob_hook_path", BEFORE_STEP)
SESSIONS = "use_session_server"  # Miles's, of samples that an agent makes in several turns
ABILITIES = (
    Check(("file", "command"), "hook under another flag", lambda given: under_another_flag(given.args)),
    Check(("file", "command"), "flags of another objective", _against_flags),
    of_command("versions not carried", _not_carried),
    of_command(
        "hook never called",
        _never_called,
        lambda given: f"{', '.join(_never_called(given))}: {{host}} has no such hook, and calls none; leave it out",
        "warn",
    ),
    of_command(
        "pass before training skipped",
        lambda given: (
            given.has("skip_actor_forward_only")
            and (any(map(given.has, NOT_SKIPPED)) or given.get("loss_type", "policy_loss") != "policy_loss")
        ),
        "skip_actor_forward_only: {host} refuses to start with it beside our hooks before a step or of a rollout, and "
        "beside a loss hook; drop it",
        arguments=("skip_actor_forward_only",),
    ),
    of_command(
        "sessions without versions",
        lambda given: given.config.segment_wise_on and given.has(SESSIONS),
        "{segment_wise}: no sample of use_session_server says which version wrote each token; drop one of them",
    ),
    of_command(
        "samples of a rollout by themselves",
        lambda given: given.get(SESSIONS) == "v2" and given.host.divides_by_kept(given.args),
        "use_session_server: v2 can make several samples of one rollout, and {host} averages each by itself, so that "
        "such a rollout weighs as many times; on Megatron they share one mean",
        "warn",
    ),
    of_command(
        "scope without rollout batch",
        lambda given: given.scope == "rollout" and not given.host.rollout_batch,
        "{weight.normalize.scope}: rollout needs the rollout batch, which no hook of {host} sees; use data_parallel",
    ),
    of_command(
        "versions unknown",
        lambda given: given.config.segment_wise_on and not (given.host.versions or given.host.version_flags),
        "{segment_wise}: {host} does not say which version wrote each token (see docs/async.md); leave it out, and "
        "give its bounds as {weight}",
    ),
    of_command(
        "head unknown",
        lambda given: given.config.center and not given.host.head_flags,
        lambda given: (
            "{center} reads rollout_topk_token_ids and rollout_topk_log_probs, which no micro-batch of {host} has; "
            "leave it out, " + VLLM_HEADS * ("vllm" in given.host.records) + "or train with Megatron on Miles or slime"
        ),
    ),
    Check(
        ("command", "routes"),
        "routers out of reach",
        lambda given: not given.host.routers and given.reads_routes,
        lambda given: ("{reject}: statistic: route" if given.config.reads_routes else "{routing}") + NO_ROUTERS,
    ),
    of_command(
        "baseline without rollout batch",
        lambda given: given.config.group_baseline and not given.host.rollout_batch,
        "{group_baseline} needs the rollout batch, which no hook of {host} sees; leave it out",
    ),
    of_command(
        "no second pass",
        lambda given: given.config.resplit_every is not None and given.host.rescore is None,
        "{resplit_every} needs the rollout-data hook, which {host} does not call; leave it out",
    ),
    of_command(
        "no step to skip",
        lambda given: not given.host.step_hook and given.config.on_all_rejected == "raise",
        "{on_all_rejected}: raise needs a hook before each train step, which {host} does not call; use skip",
    ),
    of_command(
        "versions by flags",
        lambda given: given.config.segment_wise_on and not given.host.versions,
        lambda given: f"mis.segment_wise on {{host}} needs {given.host.version_flags}",
        "warn",
    ),
    of_command(
        "head by flags",
        lambda given: given.config.center and given.host.head_flags,
        lambda given: f"mis.center on {{host}} needs {given.host.head_flags}",
        "warn",
    ),
    of_command(
        "no step to report",
        lambda given: not given.host.step_hook and given.config.metrics == "all",
        "mis.metrics: all needs a hook before each train step, which {host} does not call: there is no more than with "
        "mis.metrics: full",
        "warn",
    ),
)
HOST_CHECKS = (*ABILITIES, *REPLAYS, *PAUSES)
