"""The command line of the embedded host: the flags of a Miles launch script, and a few of its own."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence

import yaml

from mis_plugins.config_file import keys_of
from mis_plugins.errors import ConfigError
from mis_plugins.local.asynchronous.watchdog import LEAST_LIMIT_SECONDS
from mis_plugins.local.loading import load_function
from mis_plugins.offpolicyness import HeadOffpolicyness
from mis_plugins.reading import from_args

PRECISIONS = ("fp32", "bf16", "int8", "int4", "int3")
ENGINE_NAMES = ("local", "hf", "sglang")
PAUSE_MODES = ("in_place", "retract", "abort")
TASK_NAMES = ("reverse", "sort", "add")

DESCRIPTION = """\
A small, real RL run on CPU. A Megatron-core trainer learns from what a separate rollout engine sampled in a
precision of its own, so that the two disagree; load a correction as Miles and slime would load it and see what
it does.
"""

EPILOG = """\
examples:
  a quick look (about half a minute):
    python -m mis_plugins.local --smoke --output runs/smoke
  a rollout engine in int3, uncorrected, over two context-parallel ranks:
    python -m mis_plugins.local --rollout-weights int3 --context-parallel-size 2 --output runs/uncorrected
  the same, corrected:
    python -m mis_plugins.local --rollout-weights int3 --context-parallel-size 2 --output runs/corrected \\
        --use-tis --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp \\
        --custom-config-path yaml/sequence.yaml
"""

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
    _check_positive(args)
    _fill_defaults(args)
    _check_sizes(args)
    _check_engine(args)
    _check_asynchronous(args)
    _check_hooks(args)
    return args


def _fill_defaults(args: argparse.Namespace) -> None:
    """Settings that follow from others; and the attributes of the hosts that a hook may read."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    args.global_batch_size = args.global_batch_size or samples
    ranks = args.tensor_model_parallel_size * args.context_parallel_size
    if args.data_parallel_size is None:
        args.data_parallel_size = max(1, int(os.environ.get("WORLD_SIZE", str(ranks))) // ranks)
    args.world_size = ranks * args.data_parallel_size
    args.micro_batch_size = args.micro_batch_size or max(1, args.global_batch_size // args.data_parallel_size)
    args.rollout_weights = args.rollout_weights or ("fp32" if args.true_on_policy else "bf16")
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
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


def _check_positive(args: argparse.Namespace) -> None:
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)}: got {value}; give at least 1")
    if args.rollout_temperature <= 0:
        raise ConfigError(f"--rollout-temperature: got {args.rollout_temperature}; give a number above 0")
    for name in ("lr", "warmup_lr", "eps_clip", "clip_grad"):
        value = getattr(args, name)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:  # a file's 1e-4 is text to YAML
            raise ConfigError(f"{_flag(name)}: got {value!r}; give a finite number, at least 0")


def _check_sizes(args: argparse.Namespace) -> None:
    """Refuse sizes that do not divide."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    _divides(samples, "--rollout-batch-size x --n-samples-per-prompt", args, "global_batch_size")
    _divides(args.global_batch_size, "--global-batch-size", args, "data_parallel_size")
    share = args.global_batch_size // args.data_parallel_size
    _divides(share, "--global-batch-size / --data-parallel-size", args, "micro_batch_size")
    _divides(args.num_attention_heads, "--num-attention-heads", args, "num_query_groups")
    for name in ("num_query_groups", "ffn_hidden_size"):
        _divides(getattr(args, name), _flag(name), args, "tensor_model_parallel_size")
    started = os.environ.get("WORLD_SIZE")
    if started is not None and int(started) != args.world_size:
        raise ConfigError(
            f"torchrun's WORLD_SIZE = {started} is not the product of --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size}, --context-parallel-size {args.context_parallel_size} "
            f"and --data-parallel-size {args.data_parallel_size}"
        )


def _check_engine(args: argparse.Namespace) -> None:
    """Refuse an engine that does not know the precision, and truth on policy where the two sides must differ."""
    if args.rollout_engine != "local" and args.rollout_weights not in ("fp32", "bf16"):
        raise ConfigError(
            f"--rollout-engine {args.rollout_engine} with --rollout-weights {args.rollout_weights}: only the local "
            "engine emulates integers; choose fp32 or bf16"
        )
    if args.true_on_policy and args.rollout_weights != "fp32":
        raise ConfigError(
            f"--true-on-policy with --rollout-weights {args.rollout_weights}: the trainer computes in float32, so its "
            "rollout engine must; drop one of them"
        )
    if args.true_on_policy and args.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"--true-on-policy with --tensor-model-parallel-size {args.tensor_model_parallel_size}: the ranks' partial "
            "sums round differently than the engine's whole ones; use context or data parallelism"
        )


def _check_asynchronous(args: argparse.Namespace) -> None:
    """Fill in what ``--async`` leaves open; refuse what it cannot do, and its flags without it."""
    for name, value in ASYNCHRONOUS.items():
        given = getattr(args, name)
        if given is not None and not args.asynchronous:
            raise ConfigError(f"{_flag(name)} has no effect without --async; give both, or drop it")
        setattr(args, name, value if given is None else given)
    if not args.asynchronous:
        return
    HeadOffpolicyness(args.max_head_offpolicyness)
    if args.recompute_token_budget < 1:
        raise ConfigError(f"--recompute-token-budget: got {args.recompute_token_budget}; give at least 1")
    if not args.rollout_health_check_timeout >= LEAST_LIMIT_SECONDS:
        raise ConfigError(
            f"--rollout-health-check-timeout: got {args.rollout_health_check_timeout:g}; give at least "
            f"{LEAST_LIMIT_SECONDS:g} seconds, as a busy machine may keep a sound worker waiting"
        )
    for name in ("rollout_step_seconds", "rollout_steps_per_update"):
        if getattr(args, name) < 0:
            raise ConfigError(f"{_flag(name)}: got {getattr(args, name):g}; give 0 or more")
    if args.rollout_engine != "local":
        raise ConfigError(
            f"--async with --rollout-engine {args.rollout_engine}: only the local engine steps token by token in a "
            "worker of its own; use local"
        )
    if args.true_on_policy:
        raise ConfigError(
            "--async with --true-on-policy: what older weights sampled is off policy whatever the kernels; drop one"
        )
    if args.grad_cosine_every:
        raise ConfigError(
            "--grad-cosine-every with --async: it would sample afresh, and say nothing of stale samples; drop one, or "
            "see scripts/experiment-async.sh"
        )


def _check_hooks(args: argparse.Namespace) -> None:
    """Refuse hooks that cannot be loaded, and flags that need or exclude each other."""
    if args.use_tis and args.use_rollout_logprobs:
        raise ConfigError(
            "--use-tis with --use-rollout-logprobs: "
            "the first corrects the proximal policy that the second bypasses; drop one"
        )
    if (args.use_tis or args.get_mismatch_metrics) and args.custom_tis_function_path is None:
        given = "--use-tis" if args.use_tis else "--get-mismatch-metrics"
        raise ConfigError(
            f"{given} needs --custom-tis-function-path; "
            "give mis_plugins.mis.compute_mis_weights_with_cp or a function of your own"
        )
    if args.custom_tis_function_path is not None and not (args.use_tis or args.get_mismatch_metrics):
        raise ConfigError(
            "--custom-tis-function-path has no effect without --use-tis or --get-mismatch-metrics; give one of them"
        )
    if hasattr(args, "mis") and not args.asynchronous and not any(getattr(args, name) for name in _HOOKS):
        raise ConfigError(
            "--custom-config-path: its mis: has no effect without a hook that reads it; give --use-tis "
            "--custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp"
        )
    _check_loss(args)
    for name in _HOOKS:
        path = getattr(args, name)
        if path is not None:
            load_function(path, _flag(name))
    corrected = args.custom_tis_function_path if args.use_tis or args.get_mismatch_metrics else None
    for path in (corrected, args.custom_loss_function_path):
        if path is not None and path.startswith("mis_plugins."):
            from_args(args)  # our own hooks would refuse an impossible config only after the first rollout
    if args.advantage_estimator == "grpo" and args.n_samples_per_prompt < 2:
        raise ConfigError(
            f"--advantage-estimator grpo with --n-samples-per-prompt {args.n_samples_per_prompt}: "
            "a group of one has no baseline; give at least 2 samples a prompt, or use reinforce"
        )
    if args.advantage_estimator == "grpo" and args.reward_shift != 0:
        raise ConfigError(
            "--reward-shift has no effect with --advantage-estimator grpo; use reinforce or drop it"
        )


def _check_loss(args: argparse.Namespace) -> None:
    """Refuse settings of the loss that nothing would read, and a dual clip that would act on every token."""
    custom = args.loss_type == "custom_loss"
    if custom != (args.custom_loss_function_path is not None):
        raise ConfigError(
            "--loss-type custom_loss and --custom-loss-function-path need each other; give both or none"
        )
    if custom and args.custom_pg_loss_reducer_function_path is not None:
        raise ConfigError(
            "--custom-pg-loss-reducer-function-path has no effect with --loss-type custom_loss; drop one of them"
        )
    if args.use_unbiased_kl and not args.use_kl_loss:
        raise ConfigError("--use-unbiased-kl has no effect without --use-kl-loss")
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        raise ConfigError(f"--eps-clip-c: got {args.eps_clip_c:g}; a dual clip lies above 1")


def _divides(total: int, total_flag: str, args: argparse.Namespace, name: str) -> None:
    part = getattr(args, name)
    if total % part:
        raise ConfigError(f"{total_flag} = {total} is not a multiple of {_flag(name)} {part}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


ASYNCHRONOUS = {
    "max_head_offpolicyness": 2,
    "pause_generation_mode": "retract",
    "rollout_step_seconds": 0.0,
    "rollout_steps_per_update": 0,
    "recompute_token_budget": 8192,
    "rollout_health_check_timeout": 120.0,
}
"""What flags that need ``--async`` are where they are not given."""

_HOOKS = (
    "custom_tis_function_path",
    "custom_loss_function_path",
    "custom_pg_loss_reducer_function_path",
    "custom_megatron_before_train_step_hook_path",
    "rollout_data_postprocess_path",
    "rollout_sample_filter_path",
)

_POSITIVE = (
    "num_rollout",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "global_batch_size",
    "micro_batch_size",
    "context_parallel_size",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "num_digits",
    "eval_interval",
    "eval_prompts",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mis_plugins.local",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in (
        _add_run,
        _add_checkpoint,
        _add_evaluation,
        _add_task,
        _add_rollout,
        _add_asynchronous,
        _add_correction,
        _add_loss,
        _add_advantage,
        _add_clip,
        _add_kl,
        _add_optimizer,
        _add_ranks,
        _add_model,
    ):
        add(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output",
        default="runs/local",
        metavar="DIR",
        help="where metrics.jsonl, summary.json and curves.png go (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=0, help="of weights, prompts and samples (default: %(default)s)"
    )
    group.add_argument(
        "--num-rollout", type=int, default=200, help="rollouts to train on (default: %(default)s)"
    )
    group.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny run that only shows that everything works; overrides sizes",
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoint")
    group.add_argument(
        "--save", metavar="DIR", help="write a checkpoint here, at --save-interval and at the end"
    )
    group.add_argument(
        "--save-interval",
        type=int,
        default=50,
        metavar="N",
        help="rollouts between checkpoints (default: %(default)s)",
    )
    group.add_argument(
        "--load",
        metavar="DIR",
        help="resume from the checkpoint in this folder; any layout of ranks may read it",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--eval-interval",
        type=int,
        default=5,
        metavar="N",
        help="rollouts between evaluations of both policies (default: %(default)s)",
    )
    group.add_argument(
        "--eval-prompts",
        type=int,
        default=256,
        metavar="N",
        help="held-out prompts, one sample each (default: %(default)s)",
    )
    group.add_argument(
        "--grad-cosine-every",
        type=int,
        default=0,
        metavar="N",
        help="every N rollouts, compare the direction of the gradient with an on-policy one, drawn from "
        "the trainer's own weights; 0: never",
    )


def _add_task(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "task", "A string of digits to reverse, sort or add; reward 1 for exactly the right answer, else 0."
    )
    group.add_argument("--task", choices=TASK_NAMES, default="reverse", help="(default: %(default)s)")
    group.add_argument(
        "--num-digits", type=int, default=10, metavar="N", help="digits of an operand (default: %(default)s)"
    )
    group.add_argument(
        "--warmup-steps",
        type=int,
        default=500,
        metavar="N",
        help="supervised steps before RL (default: %(default)s)",
    )
    group.add_argument(
        "--warmup-lr",
        type=float,
        default=3e-3,
        help="learning rate of the supervised steps (default: %(default)s)",
    )
    group.add_argument(
        "--warmup-cache",
        metavar="DIR",
        help="where warm-started weights are kept, so that runs to be compared start from the same ones "
        "(default: beside --output)",
    )


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollout")
    group.add_argument(
        "--rollout-batch-size",
        type=int,
        default=16,
        metavar="N",
        help="prompts a rollout (default: %(default)s)",
    )
    group.add_argument(
        "--n-samples-per-prompt", type=int, default=8, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument("--rollout-temperature", type=float, default=1.0, help="(default: %(default)s)")
    group.add_argument(
        "--rollout-weights",
        choices=PRECISIONS,
        help="precision of the rollout engine's weights; the trainer is float32 (default: bf16)",
    )
    group.add_argument(
        "--rollout-engine",
        choices=ENGINE_NAMES,
        default="local",
        help="local: our own decoder; hf: Hugging Face transformers; sglang: its server, in the environment that "
        "true_on_policy/engines/install.sh makes (default: %(default)s)",
    )
    group.add_argument(
        "--true-on-policy",
        action="store_true",
        help="the same batch-invariant kernels on both sides: rollout and recomputed log-probs are equal to the bit",
    )
    group.add_argument(
        "--rollout-data-postprocess-path",
        metavar="FN",
        help="called as slime calls it, fn(args, rollout_id, rollout_data), after log-probs and advantages",
    )
    group.add_argument(
        "--rollout-sample-filter-path",
        metavar="FN",
        help="fn(args, data) with data a list of groups of samples; it may set remove_sample",
    )


def _add_asynchronous(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "asynchronous rollouts",
        "A worker process samples while the trainer steps, and the weights move under its sequences. Without the loss "
        "hook only metrics use what is recomputed before an update, which takes the trainer's time all the same: "
        "segment_wise: {enabled: false} under mis: in --custom-config-path saves it.",
    )
    group.add_argument(
        "--async", dest="asynchronous", action="store_true", help="sample in a process of its own"
    )
    group.add_argument(
        "--max-head-offpolicyness",
        type=int,
        metavar="N",
        help="the most versions a token may be older than the weights that train on it; 0 is synchronous "
        f"(default: {ASYNCHRONOUS['max_head_offpolicyness']})",
    )
    group.add_argument(
        "--pause-generation-mode",
        choices=PAUSE_MODES,
        help="what new weights do to a sequence: in_place goes on over the old keys and values, retract makes them "
        "anew, abort ends it, to be resumed from its tokens "
        f"(default: {ASYNCHRONOUS['pause_generation_mode']})",
    )
    group.add_argument(
        "--rollout-step-seconds",
        type=float,
        metavar="S",
        help="a decode step takes at least as long: emulates a slow engine "
        f"(default: {ASYNCHRONOUS['rollout_step_seconds']:g})",
    )
    group.add_argument(
        "--rollout-steps-per-update",
        type=int,
        metavar="N",
        help="decode steps of a sequence between two updates, at most, while the trainer does not wait for it: so that "
        "the sequences of a small model outlive updates as those of a large one do; 0: no limit "
        f"(default: {ASYNCHRONOUS['rollout_steps_per_update']})",
    )
    group.add_argument(
        "--recompute-token-budget",
        type=int,
        metavar="N",
        help="tokens a forward pass when the waiting samples are scored before an update "
        f"(default: {ASYNCHRONOUS['recompute_token_budget']})",
    )
    group.add_argument(
        "--rollout-health-check-timeout",
        type=float,
        metavar="S",
        help="a worker that uses no processor time for this long is stuck, and replaced; one that computes is not, "
        f"unless a single step takes ten times as long (default: {ASYNCHRONOUS['rollout_health_check_timeout']:g})",
    )


def _add_correction(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "correction",
        "Of the mismatch between trainer and rollout engine, by a hook loaded as Miles loads it.",
    )
    group.add_argument("--use-tis", action="store_true", help="let the hook change the loss and its masks")
    group.add_argument("--get-mismatch-metrics", action="store_true", help="call the hook for its metrics")
    group.add_argument(
        "--custom-tis-function-path",
        metavar="FN",
        help="dotted path, e.g. mis_plugins.mis.compute_mis_weights_with_cp",
    )
    group.add_argument(
        "--custom-config-path",
        metavar="YAML",
        help="each top-level key becomes an attribute of args, as in the hosts",
    )
    group.add_argument(
        "--use-rollout-logprobs",
        action="store_true",
        help="PPO against the rollout engine's log-probs, without recomputing them",
    )


def _add_loss(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loss")
    group.add_argument(
        "--loss-type",
        choices=("policy_loss", "custom_loss"),
        default="policy_loss",
        help="of the host, or of --custom-loss-function-path (default: %(default)s)",
    )
    group.add_argument(
        "--custom-loss-function-path",
        metavar="FN",
        help="fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)",
    )
    group.add_argument(
        "--custom-pg-loss-reducer-function-path",
        metavar="FN",
        help="fn(total_lengths, response_lengths, masks, calculate_per_token_loss) -> a function of the policy "
        "loss of every token",
    )
    group.add_argument(
        "--calculate-per-token-loss", action="store_true", help="average over tokens, not over samples"
    )


def _add_advantage(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("advantage")
    group.add_argument(
        "--advantage-estimator",
        choices=("grpo", "reinforce"),
        default="grpo",
        help="grpo: reward minus the mean of its prompt's group, over its deviation; reinforce: reward + "
        "--reward-shift (default: %(default)s)",
    )
    group.add_argument(
        "--disable-grpo-std-normalization", action="store_true", help="grpo: subtract the group's mean only"
    )
    group.add_argument(
        "--reward-shift",
        type=float,
        default=0.0,
        metavar="X",
        help="reinforce: -1 punishes failures and leaves successes alone (default: %(default)s)",
    )


def _add_clip(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("clip")
    group.add_argument("--eps-clip", type=float, default=0.2, help="PPO clip (default: %(default)s)")
    group.add_argument("--eps-clip-high", type=float, help="upper PPO clip (default: --eps-clip)")
    group.add_argument("--eps-clip-c", type=float, metavar="C", help="dual clip: at most -C A where A < 0")


def _add_kl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KL loss", "Towards the policy of before the first rollout, frozen.")
    group.add_argument("--use-kl-loss", action="store_true", help="add the KL term to the loss")
    group.add_argument("--kl-loss-coef", type=float, default=0.0, help="its factor (default: %(default)s)")
    group.add_argument(
        "--kl-loss-type",
        choices=("k1", "k2", "k3", "low_var_kl"),
        default="k1",
        help="its estimator (default: %(default)s)",
    )
    group.add_argument(
        "--use-unbiased-kl", action="store_true", help="multiply it by the ratio of target to proximal policy"
    )


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="samples an optimizer step (default: the whole rollout)",
    )
    group.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="N",
        help="samples of one data-parallel rank a forward pass (default: all of its share)",
    )
    group.add_argument("--lr", type=float, default=5e-5, help="(default: %(default)s)")
    group.add_argument("--adam-beta1", type=float, default=0.9, help="(default: %(default)s)")
    group.add_argument("--adam-beta2", type=float, default=0.98, help="(default: %(default)s)")
    group.add_argument("--weight-decay", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--clip-grad",
        type=float,
        default=1.0,
        help="limit of the gradient norm; 0: none (default: %(default)s)",
    )
    group.add_argument(
        "--custom-megatron-before-train-step-hook-path",
        metavar="FN",
        help="fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), once gradients are zero",
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks", "Forked by this command, or made by torchrun.")
    group.add_argument(
        "--context-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share each sequence (default: %(default)s)",
    )
    group.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share each matrix (default: %(default)s)",
    )
    group.add_argument(
        "--data-parallel-size",
        type=int,
        metavar="N",
        help="ranks that share the samples (default: what torchrun started leaves, else 1)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model", "A Qwen3-shaped decoder, under Megatron's names.")
    group.add_argument("--hidden-size", type=int, default=64, metavar="N", help="(default: %(default)s)")
    group.add_argument("--num-layers", type=int, default=2, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--num-attention-heads", type=int, default=4, metavar="N", help="(default: %(default)s)"
    )
    group.add_argument("--num-query-groups", type=int, default=2, metavar="N", help="(default: %(default)s)")
    group.add_argument(
        "--kv-channels", type=int, default=16, metavar="N", help="size of a head (default: %(default)s)"
    )
    group.add_argument("--ffn-hidden-size", type=int, default=128, metavar="N", help="(default: %(default)s)")
