"""The arguments of the embedded host: parsed, completed, and refused where they cannot work together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import yaml

from lab.host.asynchronous.staleness_bound import HeadOffpolicyness
from lab.host.asynchronous.update_hooks import Hooks, Point
from lab.host.cli.flags import TELLING, build_parser, named, spelled
from lab.host.cli.loading import load_function
from mis_plugins.config.file import keys_of
from mis_plugins.config.reading import from_args
from mis_plugins.errors import ConfigError
from mis_plugins.shared.numerals import LARGEST, shown
from true_on_policy.contract.sides import ENGINES

SMOKE = {
    "num_rollout": 3,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "global_batch_size": 8,
    "warmup_steps": 20,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "micro_batch_size": None,
    "eval_prompts": 16,
    "eval_interval": 2,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse, merge ``--custom-config-path`` as the hosts do, and check what can be checked without a model.

    Raises:
        ConfigError: settings that cannot work together; the message quotes the flags.
    """
    args = build_parser().parse_args(argv)
    if args.smoke:
        vars(args).update(SMOKE)
    if args.custom_config_path is not None:
        merge_custom_config(args, args.custom_config_path)
    _refuse(_numbers(args))
    _fill_defaults(args)
    _refuse(_sizes(args), _experts(args), _engine(args), _cut(args), _unused_without_async(args))
    if args.asynchronous:
        _fill_asynchronous(args)
        _refuse(_asynchronous(args))
    _refuse(_correction(args), _loss(args))
    _check_hooks(args)
    _refuse(_advantage(args))
    return args


def _fill_defaults(args: argparse.Namespace) -> None:
    """Settings that follow from others; and the attributes of the hosts that a hook may read."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    args.global_batch_size = args.global_batch_size or samples
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    args.world_size = ranks * args.data_parallel_size
    args.micro_batch_size = args.micro_batch_size or max(1, args.global_batch_size // args.data_parallel_size)
    args.rollout_weights = args.rollout_weights or ("fp32" if args.true_on_policy else "bf16")
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    if args.num_experts:
        args.moe_router_topk = args.moe_router_topk or 2
        args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.qkv_format = "thd"
    args.entropy_coef = 0.0


def merge_custom_config(args: argparse.Namespace, path: str) -> None:
    """Set every top-level key of a YAML file on ``args``, as Miles and slime do: without a schema."""
    try:
        keys = keys_of(path)
    except (OSError, yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"--custom-config-path {path}: {error}") from error
    for key, value in keys.items():
        setattr(args, key, value)
    if isinstance(keys.get("rollout"), Mapping):
        _take_areals_bounds(args, keys["rollout"])


def _take_areals_bounds(args: argparse.Namespace, block: Mapping[str, Any]) -> None:
    """Set the bounds of AReaL's `rollout:` block on ``args``; AReaL counts concurrent rollouts in prompts."""
    bound, places = block.get("max_head_offpolicyness"), block.get("max_concurrent_rollouts")
    if bound is not None:
        args.max_head_offpolicyness = bound
    if places is not None:
        each = args.n_samples_per_prompt if isinstance(places, int) else 1
        args.max_concurrent_rollouts = places * each


def _refuse(*faults: Iterator[str]) -> None:
    for fault in faults:
        for message in fault:
            raise ConfigError(message)


def _numbers(args: argparse.Namespace) -> Iterator[str]:
    """Sizes below 1, and rates below 0: a file may say anything, and its 1e-4 is text to YAML."""
    for name in named("size"):
        value = getattr(args, name)
        if value is not None and not isinstance(value, int):
            yield f"{spelled(name)}: got {shown(value)}; give a whole number"
        elif value is not None and not 1 <= value <= LARGEST:
            yield f"{spelled(name)}: got {shown(value)}; give at least 1, at most {LARGEST}"
    if args.rollout_temperature <= 0:
        yield f"--rollout-temperature: got {args.rollout_temperature}; give a number above 0"
    for name in named("rate"):
        value = getattr(args, name)
        if not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            yield f"{spelled(name)}: got {shown(value)}; give a finite number, at least 0"


def _sizes(args: argparse.Namespace) -> Iterator[str]:
    """Sizes that do not divide."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    share = args.global_batch_size // args.data_parallel_size
    for total, told, part in (
        (samples, "--rollout-batch-size x --n-samples-per-prompt", "global_batch_size"),
        (args.global_batch_size, "--global-batch-size", "data_parallel_size"),
        (share, "--global-batch-size / --data-parallel-size", "micro_batch_size"),
        (args.num_attention_heads, "--num-attention-heads", "num_query_groups"),
        (args.num_query_groups, "--num-query-groups", "tensor_model_parallel_size"),
        (args.ffn_hidden_size, "--ffn-hidden-size", "tensor_model_parallel_size"),
    ):
        if total % getattr(args, part):
            yield f"{told} = {total} is not a multiple of {spelled(part)} {getattr(args, part)}"


def _experts(args: argparse.Namespace) -> Iterator[str]:
    """Flags of experts without ``--num-experts``, and what experts or their replay cannot do here."""
    given = [name for name in _OF_EXPERTS if getattr(args, name)]
    if given and not args.num_experts:
        yield f"{spelled(given[0])} has no effect without --num-experts; give both, or drop it"
    if not args.num_experts:
        return
    if args.moe_router_topk > args.num_experts:
        yield (
            f"--moe-router-topk {args.moe_router_topk} with --num-experts {args.num_experts}: a token cannot take more "
            "experts than there are"
        )
    if args.tensor_model_parallel_size > 1:
        yield (
            f"--num-experts with --tensor-model-parallel-size {args.tensor_model_parallel_size}: Megatron-core trains "
            "experts so with sequence parallelism alone, which this host lacks; use context or data parallelism"
        )
    if not args.qk_layernorm:
        yield "--num-experts with --no-qk-layernorm: the experts are Qwen3-MoE's, which has it; drop one"
    if args.use_rollout_routing_replay and args.rollout_engine != "local":
        yield (
            f"--use-rollout-routing-replay with --rollout-engine {args.rollout_engine}: on a CPU that engine does not "
            "return its routes; choose local"
        )
    if args.use_rollout_routing_replay and args.asynchronous:
        yield (
            "--use-rollout-routing-replay with --async: a response that outlives an update has routes of several "
            "weights, which are not handed on; drop one"
        )


def _engine(args: argparse.Namespace) -> Iterator[str]:
    """An engine that lacks precision or head size, and --true-on-policy where sides must differ."""
    engine = f"--rollout-engine {args.rollout_engine}"
    if args.rollout_engine != "local" and args.rollout_weights not in ("fp32", "bf16"):
        yield (
            f"{engine} with --rollout-weights {args.rollout_weights}: only the local engine emulates integers; choose "
            "fp32 or bf16"
        )
    sizes = ENGINES[args.rollout_engine].head_sizes if args.rollout_engine in ENGINES else ()
    if sizes and args.kv_channels not in sizes:
        yield (
            f"{engine} with --kv-channels {args.kv_channels}: on a CPU the engine knows heads of "
            f"{', '.join(map(str, sizes))}; give one of these sizes"
        )
    if args.check_weights_every and (args.asynchronous or args.rollout_engine not in TELLING):
        yield (
            f"--check-weights-every with {'--async' if args.asynchronous else engine}: no weights can be asked for "
            f"there; give --rollout-engine {' or '.join(TELLING)}, without --async, or drop it"
        )
    if args.true_on_policy and args.rollout_weights != "fp32":
        yield (
            f"--true-on-policy with --rollout-weights {args.rollout_weights}: the trainer computes in float32, so its "
            "rollout engine must; drop one of them"
        )
    if args.true_on_policy and args.tensor_model_parallel_size > 1:
        yield (
            f"--true-on-policy with --tensor-model-parallel-size {args.tensor_model_parallel_size}: the ranks' partial "
            "sums round differently than the engine's whole ones; use context or data parallelism"
        )


def _cut(args: argparse.Namespace) -> Iterator[str]:
    """Impossible top-p and top-k, and a cut where the trainer cannot know which tokens are left."""
    top_p, top_k = args.rollout_top_p, args.rollout_top_k
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        yield f"--rollout-top-p: got {shown(top_p)}; give a number above 0, at most 1"
    if not isinstance(top_k, int) or (top_k != -1 and top_k < 2):
        yield (
            f"--rollout-top-k: got {shown(top_k)}; give -1 for all tokens, or at least 2: a single one has no gradient"
        )
    if top_p == 1 and top_k == -1:
        return
    flag = f"--rollout-top-p {top_p:g}" if top_p != 1 else f"--rollout-top-k {top_k}"
    if args.rollout_engine not in ENGINES or not ENGINES[args.rollout_engine].cuts:
        cutting = ", ".join(name for name, spec in ENGINES.items() if spec.cuts and spec.serve)
        yield (
            f"{flag} with --rollout-engine {args.rollout_engine}: the engine returns no list of the tokens that it "
            f"samples from, over which the trainer has to renormalize; choose {cutting}"
        )
    for name, why in _UNCUT.items():
        if getattr(args, name):
            yield f"{flag} with {spelled(name)}: {why}; drop one"


def _unused_without_async(args: argparse.Namespace) -> Iterator[str]:
    for name in [*named("later"), *map(_hook_path, POINTS)]:
        if getattr(args, name) is not None and not args.asynchronous:
            yield f"{spelled(name)} has no effect without --async; give both, or drop it"


def _fill_asynchronous(args: argparse.Namespace) -> None:
    """Fill in what ``--async`` leaves open."""
    for name, value in named("later").items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def register_hooks(hooks: Hooks, args: argparse.Namespace) -> None:
    """Register the user's own hooks of each kind, in the order of the command line.

    Raises:
        ConfigError: a path that cannot be loaded, or a function that takes arguments; it quotes the flag.
    """
    for point in POINTS:
        flag, paths = spelled(_hook_path(point)), getattr(args, _hook_path(point))
        for path in (
            [paths] if isinstance(paths, str) else paths or []
        ):  # a file may give a single one as text
            hook = load_function(path, flag)
            try:
                hooks.register(point, hook, path)
            except ConfigError as error:
                raise ConfigError(f"{flag}: {error}") from None


def _hook_path(point: Point) -> str:
    return f"{point}_hook_path"


def _asynchronous(args: argparse.Namespace) -> Iterator[str]:
    """What ``--async`` cannot do."""
    HeadOffpolicyness(args.max_head_offpolicyness)
    if args.recompute_token_budget < 1:
        yield f"--recompute-token-budget: got {args.recompute_token_budget}; give at least 1"
    places = args.max_concurrent_rollouts
    if places is not None and (not isinstance(places, int) or isinstance(places, bool) or places < 1):
        yield f"--max-concurrent-rollouts: got {places!r}; give a whole number, at least 1"
    register_hooks(Hooks(), args)
    for name in ("rollout_step_seconds", "rollout_steps_per_update"):
        if getattr(args, name) < 0:
            yield f"{spelled(name)}: got {getattr(args, name):g}; give 0 or more"
    if args.true_on_policy:
        yield "--async with --true-on-policy: what older weights sampled is off policy whatever the kernels; drop one"
    if args.grad_cosine_every:
        yield (
            "--grad-cosine-every with --async: the gradient would be of fresh samples, not of stale ones; drop one, or "
            "see scripts/experiment-async-weights.sh"
        )


def _correction(args: argparse.Namespace) -> Iterator[str]:
    """A hook or a config that nothing would read, and a correction of a policy that is bypassed."""
    asked = "--use-tis" if args.use_tis else "--get-mismatch-metrics" if args.get_mismatch_metrics else None
    if args.use_tis and args.use_rollout_logprobs:
        yield (
            "--use-tis with --use-rollout-logprobs: the first corrects the proximal policy that the second bypasses; "
            "drop one"
        )
    by_loss_hook = args.custom_loss_function_path == "mis_plugins.mis.policy_loss"
    if asked and args.custom_tis_function_path is None and not by_loss_hook:
        yield (
            f"{asked} needs --custom-tis-function-path; give mis_plugins.mis.compute_mis_weights_with_cp or a function "
            "of your own"
        )
    if args.custom_tis_function_path is not None and not asked:
        yield (
            "--custom-tis-function-path has no effect without --use-tis or --get-mismatch-metrics; give one of them"
        )
    if (
        hasattr(args, "mis")
        and not args.asynchronous
        and not any(getattr(args, name) for name in named("hook"))
    ):
        yield (
            "--custom-config-path: `mis:` in the file has no effect without a hook that reads it; give --use-tis "
            "--custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
        )


def _check_hooks(args: argparse.Namespace) -> None:
    """Refuse hooks that cannot be loaded, and a config that ours would refuse only after the first rollout."""
    for name in named("hook"):
        path = getattr(args, name)
        if path is not None:
            load_function(path, spelled(name))
    for path in (args.custom_tis_function_path, args.custom_loss_function_path):
        if path is not None and path.startswith("mis_plugins."):
            from_args(args)


def _advantage(args: argparse.Namespace) -> Iterator[str]:
    """Groups of one, and a shift of rewards that a group's baseline takes away again."""
    if args.advantage_estimator == "grpo" and args.n_samples_per_prompt < 2:
        yield (
            f"--advantage-estimator grpo with --n-samples-per-prompt {args.n_samples_per_prompt}: a group of one has "
            "no baseline; give at least 2 samples a prompt, or use reinforce"
        )
    if args.advantage_estimator == "grpo" and args.reward_shift != 0:
        yield "--reward-shift has no effect with --advantage-estimator grpo; use reinforce or drop it"


def _loss(args: argparse.Namespace) -> Iterator[str]:
    """Settings of the loss that nothing would read."""
    custom = args.loss_type == "custom_loss"
    if custom != (args.custom_loss_function_path is not None):
        yield "--loss-type custom_loss and --custom-loss-function-path need each other; give both or none"
    if custom and args.custom_pg_loss_reducer_function_path is not None:
        yield (
            "--custom-pg-loss-reducer-function-path has no effect with --loss-type custom_loss; drop one of them"
        )


POINTS: tuple[Point, ...] = get_args(Point)

_UNCUT = {
    "asynchronous": "the tokens that are left are not handed on",
    "true_on_policy": "engine and trainer renormalize by other formulas, which round differently",
    "grad_cosine_every": "the gradient that it compares with is of the whole vocabulary",
}
"""Arguments that exclude top-p and top-k, and why."""

_OF_EXPERTS = ("moe_router_topk", "moe_ffn_hidden_size", "use_rollout_routing_replay")
