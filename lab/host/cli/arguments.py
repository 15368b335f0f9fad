"""The arguments of the embedded host: parsed, completed, and refused where they cannot work together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, get_args

import yaml

from lab.host.asynchronous.update_hooks import Hooks, Point
from lab.host.cli.flags import KINDS, TELLING, Flags, build_parser, choices_of, named, spelled
from lab.host.cli.loading import load_function
from lab.host.rollout.serving import SERVING
from mis_plugins.config.file import keys_of
from mis_plugins.config.reading import from_args
from mis_plugins.errors import LARGEST, ConfigError, shown

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
    """Parse, merge `--custom-config-path` as the hosts do, and check what can be checked without a model.

    Raises:
        ConfigError: settings that cannot work together; the message quotes the flags.
    """
    args = build_parser().parse_args(argv)
    if args.smoke:
        vars(args).update(SMOKE)
    if args.custom_config_path is not None:
        merge_custom_config(args, args.custom_config_path)
    _refuse(_values(args), _ranges(args))
    _fill_defaults(args)
    _refuse(_sizes(args), _unused(args), _pairs(args))
    if args.asynchronous:
        for name, value in named("later").items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        register_hooks(Hooks(), args)  # which refuses what is no hook
    _refuse(_correction(args), _loss(args))
    _check_hooks(args)
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
    """Set every top-level key of a YAML file on `args`, as Miles and slime do: without a schema."""
    try:
        keys = keys_of(path)
    except (OSError, yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"--custom-config-path {path}: {error}") from error
    for key, value in keys.items():
        setattr(args, key, value)
    if isinstance(keys.get("rollout"), Mapping):
        _take_areals_bounds(args, keys["rollout"])


def _take_areals_bounds(args: argparse.Namespace, block: Mapping[str, Any]) -> None:
    """Set the bounds of AReaL's `rollout:` block on `args`; AReaL counts concurrent rollouts in prompts."""
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


def _values(args: argparse.Namespace) -> Iterator[str]:
    """Values that their flags do not take: a file may say anything, and its 1e-4 is text to YAML."""
    for one in fields(Flags):
        value = getattr(args, one.name)
        mend = None if value is None and one.default is None else _mend(one, value)
        if mend:
            yield f"{spelled(one.name)}: got {shown(value)}; {mend}"


def _mend(one: Field[Any], value: Any) -> str | None:
    """What to give a flag in place of a value that it does not take; None where it takes the value."""
    kind, choices, marks = KINDS[one.name], choices_of(one), one.metadata
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and isinstance(value, int)
    if choices:
        return None if value in choices else f"choose one of {', '.join(choices)}"
    if kind is bool:
        return None if isinstance(value, bool) else "give true or false"
    if "rate" in marks:
        return None if number and 0 <= value <= sys.float_info.max else "give a finite number, at least 0"
    if kind is float:
        return None if number and abs(value) <= sys.float_info.max else "give a finite number"
    if "count" in marks:
        return None if whole and value >= 0 else "give a whole number, at least 0"
    if kind is int and not whole:
        return "give a whole number"
    return f"give at least 1, at most {LARGEST}" if "size" in marks and not 1 <= value <= LARGEST else None


def _ranges(args: argparse.Namespace) -> Iterator[str]:
    """Numbers outside what sampling can use."""
    top_p, top_k = args.rollout_top_p, args.rollout_top_k
    if not 0 < top_p <= 1:
        yield f"--rollout-top-p: got {shown(top_p)}; give a number above 0, at most 1"
    if top_k != -1 and top_k < 2:
        yield (
            f"--rollout-top-k: got {shown(top_k)}; give -1 for all tokens, or at least 2: a single one has no gradient"
        )
    if args.rollout_temperature <= 0:
        yield f"--rollout-temperature: got {args.rollout_temperature}; give a number above 0"


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


def _unused(args: argparse.Namespace) -> Iterator[str]:
    """Settings that nothing reads without another one."""
    for name, needed in NEEDS.items():
        given = getattr(args, name) is not None and getattr(args, name) is not False
        if given and not getattr(args, needed):
            yield f"{spelled(name)} has no effect without {spelled(needed)}; give both, or drop it"


@dataclass(frozen=True)
class Pair:
    """Two settings that cannot work together, and why; they meet where both are given, or where `meet` says so."""

    one: str
    other: str
    why: str
    meet: Callable[[argparse.Namespace], object] | None = None

    def of(self, args: argparse.Namespace) -> bool:
        if self.meet is not None:
            return bool(self.meet(args))
        return bool(getattr(args, self.one) and getattr(args, self.other))


def _pairs(args: argparse.Namespace) -> Iterator[str]:
    """Settings that exclude each other, and heads of a size that an engine does not know."""
    for pair in PAIRS:
        if pair.of(args):
            yield f"{_told(args, pair.one)} with {_told(args, pair.other)}: {pair.why}"
    sizes = SERVING[args.rollout_engine].head_sizes if args.rollout_engine in SERVING else ()
    if sizes and args.kv_channels not in sizes:
        yield (
            f"{_told(args, 'rollout_engine')} with {_told(args, 'kv_channels')}: on a CPU the engine knows heads of "
            f"{', '.join(map(str, sizes))}; give one of these sizes"
        )


def _told(args: argparse.Namespace, name: str) -> str:
    """A setting as the command line would spell it."""
    value, flag = getattr(args, name), spelled(name)
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


def register_hooks(hooks: Hooks, args: argparse.Namespace) -> None:
    """Register the user's own hooks of each kind, in the order of the command line.

    Raises:
        ConfigError: a path that cannot be loaded, or a function that takes arguments; it quotes the flag.
    """
    for point in POINTS:
        flag, paths = spelled(_hook_path(point)), getattr(args, _hook_path(point))
        for path in [paths] if isinstance(paths, str) else paths or []:  # a file may give a single one as text
            hook = load_function(path, flag)
            try:
                hooks.register(point, hook, path)
            except ConfigError as error:
                raise ConfigError(f"{flag}: {error}") from None


def _hook_path(point: Point) -> str:
    return f"{point}_hook_path"


def _correction(args: argparse.Namespace) -> Iterator[str]:
    """A hook or a config that nothing would read."""
    asked = "--use-tis" if args.use_tis else "--get-mismatch-metrics" if args.get_mismatch_metrics else None
    by_loss_hook = args.custom_loss_function_path == "mis_plugins.mis.policy_loss"
    if asked and args.custom_tis_function_path is None and not by_loss_hook:
        yield (
            f"{asked} needs --custom-tis-function-path; give mis_plugins.mis.compute_mis_weights_with_cp or a function "
            "of your own"
        )
    if args.custom_tis_function_path is not None and not asked:
        yield ("--custom-tis-function-path has no effect without --use-tis or --get-mismatch-metrics; give one of them")
    if hasattr(args, "mis") and not args.asynchronous and not any(getattr(args, name) for name in named("hook")):
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


def _loss(args: argparse.Namespace) -> Iterator[str]:
    """Settings of the loss that nothing would read."""
    custom = args.loss_type == "custom_loss"
    if custom != (args.custom_loss_function_path is not None):
        yield "--loss-type custom_loss and --custom-loss-function-path need each other; give both or none"
    if custom and args.custom_pg_loss_reducer_function_path is not None:
        yield ("--custom-pg-loss-reducer-function-path has no effect with --loss-type custom_loss; drop one of them")


POINTS: tuple[Point, ...] = get_args(Point)

NEEDS = dict.fromkeys(("moe_router_topk", "moe_ffn_hidden_size", "use_rollout_routing_replay"), "num_experts")
NEEDS |= dict.fromkeys([*named("later"), *map(_hook_path, POINTS)], "asynchronous")
"""Settings by name, each with the setting without which it has no effect."""

CUTTING = [name for name, engine in SERVING.items() if engine.cuts]
PAIRS: tuple[Pair, ...] = (
    Pair("num_experts", "tensor_model_parallel_size",
         "Megatron-core trains experts so with sequence parallelism alone, which this host lacks; use context or data "
         "parallelism", lambda args: args.num_experts and args.tensor_model_parallel_size > 1),
    Pair("num_experts", "qk_layernorm", "the experts are Qwen3-MoE's, which has it; drop one",
         lambda args: args.num_experts and not args.qk_layernorm),
    Pair("moe_router_topk", "num_experts", "a token cannot take more experts than there are",
         lambda args: args.num_experts and args.moe_router_topk > args.num_experts),
    Pair("use_rollout_routing_replay", "rollout_engine",
         "on a CPU that engine does not return its routes; choose local",
         lambda args: args.use_rollout_routing_replay and args.rollout_engine != "local"),
    Pair("use_rollout_routing_replay", "asynchronous",
         "a response that outlives an update has routes of several weights, which are not handed on; drop one"),
    Pair("rollout_engine", "rollout_weights", "only the local engine emulates integers; choose fp32 or bf16",
         lambda args: args.rollout_engine != "local" and args.rollout_weights not in ("fp32", "bf16")),
    Pair("check_weights_every", "asynchronous", "no weights can be asked for there; drop one"),
    Pair("check_weights_every", "rollout_engine",
         f"no weights can be asked for there; give --rollout-engine {' or '.join(TELLING)}, or drop it",
         lambda args: args.check_weights_every and args.rollout_engine not in TELLING),
    Pair("true_on_policy", "rollout_weights",
         "the trainer computes in float32, so its rollout engine must; drop one of them",
         lambda args: args.true_on_policy and args.rollout_weights != "fp32"),
    Pair("true_on_policy", "tensor_model_parallel_size",
         "the ranks' partial sums round differently than the engine's whole ones; use context or data parallelism",
         lambda args: args.true_on_policy and args.tensor_model_parallel_size > 1),
    Pair("asynchronous", "true_on_policy",
         "what older weights sampled is off policy whatever the kernels; drop one"),
    Pair("grad_cosine_every", "asynchronous", "the gradient would be of fresh samples, not of stale ones; drop one, "
         "or see scripts/experiment-async-weights.sh"),
    Pair("use_tis", "use_rollout_logprobs",
         "the first corrects the proximal policy that the second bypasses; drop one"),
    Pair("advantage_estimator", "n_samples_per_prompt",
         "a group of one has no baseline; give at least 2 samples a prompt, or use reinforce",
         lambda args: args.advantage_estimator == "grpo" and args.n_samples_per_prompt < 2),
    Pair("reward_shift", "advantage_estimator", "a group's baseline takes it away again; use reinforce or drop it",
         lambda args: args.advantage_estimator == "grpo" and args.reward_shift != 0),
    Pair("rollout_top_logprobs_num", "rollout_engine", "no other engine hands on what it names; choose local",
         lambda args: args.rollout_top_logprobs_num and args.rollout_engine != "local"),
    Pair("rollout_top_logprobs_num", "asynchronous", "the tokens that the engine names are not handed on; drop one"),
    *(
        Pair(cut, other, why, lambda args, cut=cut, all=all, meet=meet: getattr(args, cut) != all and meet(args))
        for cut, all in (("rollout_top_p", 1), ("rollout_top_k", -1))
        for other, why, meet in (
            ("rollout_engine", "the engine returns no list of the tokens that it samples from, over which the trainer "
             f"has to renormalize; choose {', '.join(CUTTING)}", lambda args: args.rollout_engine not in CUTTING),
            ("asynchronous", "the tokens that are left are not handed on; drop one", lambda args: args.asynchronous),
            ("true_on_policy", "engine and trainer renormalize by other formulas, which round differently; drop one",
             lambda args: args.true_on_policy),
            ("grad_cosine_every", "the gradient that it compares with is of the whole vocabulary; drop one",
             lambda args: args.grad_cosine_every),
        )
    ),
)  # fmt: skip
"""What excludes each other."""
