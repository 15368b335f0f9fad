"""The command line of the embedded host: the flags of a Miles launch script, and a few of its own."""

from __future__ import annotations

import argparse
from typing import Any

from lab.host.asynchronous.update_hooks import Point
from mis_plugins.shared.numerals import finite, whole
from mis_plugins.shared.shell import add_version
from true_on_policy.contract.sides import ENGINES

PRECISIONS = ("fp32", "bf16", "int8", "int4", "int3")
SERVED = {name: spec.words for name, spec in sorted(ENGINES.items()) if spec.serve}
"""Engines of ``true_on_policy`` that can serve a training loop, and what they are."""
ENGINE_NAMES = ("local", *SERVED)
TELLING = tuple(name for name, spec in sorted(ENGINES.items()) if spec.serve and spec.tells_weights)
"""Engines whose weights can be read back."""
PAUSE_MODES = ("in_place", "retract", "abort")
TASK_NAMES = ("reverse", "sort", "add")

ASYNCHRONOUS = {
    "max_head_offpolicyness": 2,
    "max_concurrent_rollouts": None,
    "pause_generation_mode": "retract",
    "rollout_step_seconds": 0.0,
    "rollout_steps_per_update": 0,
    "recompute_token_budget": 8192,
    "rollout_health_check_timeout": 120.0,
}
"""Defaults of the flags that need ``--async``."""

HOOK_POINTS: dict[Point, str] = {
    "pre_pause": "before generation pauses for new weights",
    "post_pause": "once nothing is generated any more, before the weights move",
    "pre_resume": "after the weights have moved, before generation goes on",
    "post_resume": "once generation goes on",
}
"""When each kind of user hook runs."""

DESCRIPTION = """\
A small, real RL run on CPU. A Megatron-core trainer learns from what a separate rollout engine sampled in a
precision of its own, so that the two disagree; load a correction as Miles and slime would load it and see what
it does.
"""

EPILOG = """\
examples:
  a quick look (about half a minute):
    python -m lab.host --smoke --output runs/smoke
  a rollout engine in int3, uncorrected, over two context-parallel ranks:
    python -m lab.host --rollout-weights int3 --context-parallel-size 2 --output runs/uncorrected
  the same, corrected:
    python -m lab.host --rollout-weights int3 --context-parallel-size 2 --output runs/corrected \\
        --use-tis --custom-tis-function-path mis_plugins.mis.compute_mis_weights_with_cp \\
        --custom-config-path yaml/sequence.yaml
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.host",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
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


def _count(group: argparse._ArgumentGroup, flag: str, default: int, words: str = "") -> None:
    """Declare a whole number, whose help ends with its default."""
    group.add_argument(
        flag, type=whole, default=default, metavar="N", help=f"{words} (default: %(default)s)".strip()
    )


def _needs_async(group: argparse._ArgumentGroup, flag: str, words: str, **more: Any) -> None:
    """Declare a flag that has no effect without `--async`, whose default stands in ASYNCHRONOUS."""
    default = ASYNCHRONOUS[flag.removeprefix("--").replace("-", "_")]
    shown = "no limit" if default is None else f"{default:g}" if isinstance(default, float) else default
    group.add_argument(flag, help=f"{words} (default: {shown})", **more)


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output",
        default="runs/local",
        metavar="DIR",
        help="where metrics.jsonl, summary.json and curves.png go (default: %(default)s); where an earlier run lies "
        "there and --load does not resume it, the first free one of DIR-2, DIR-3 and so on",
    )
    _count(group, "--seed", 0, "of weights, prompts and samples")
    _count(group, "--num-rollout", 200, "rollouts to train on")
    group.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny run that only shows that everything works; overrides sizes",
    )
    group.add_argument(
        "--quiet",
        action="store_true",
        help="no table and no progress bar; the line that says where the run lies remains",
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoint")
    group.add_argument(
        "--save", metavar="DIR", help="write a checkpoint here, at --save-interval and at the end"
    )
    _count(group, "--save-interval", 50, "rollouts between checkpoints")
    group.add_argument(
        "--load",
        metavar="DIR",
        help="resume from the checkpoint in this folder; any layout of ranks may read it",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    _count(group, "--eval-interval", 5, "rollouts between evaluations of both policies")
    _count(group, "--eval-prompts", 256, "held-out prompts, one sample each")
    group.add_argument(
        "--grad-cosine-every",
        type=whole,
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
    _count(group, "--num-digits", 10, "digits of an operand")
    _count(group, "--warmup-steps", 500, "supervised steps before RL")
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
    _count(group, "--rollout-batch-size", 16, "prompts a rollout")
    _count(group, "--n-samples-per-prompt", 8)
    group.add_argument("--rollout-temperature", type=float, default=1.0, help="(default: %(default)s)")
    _add_cut(group)
    _add_engine(group)
    group.add_argument(
        "--use-rollout-routing-replay",
        action="store_true",
        help="R3: the engine returns the experts that each token took, and the trainer's routers take the same ones",
    )
    group.add_argument(
        "--rollout-data-postprocess-path",
        metavar="FN",
        help="called as slime calls it, fn(args, rollout_id, rollout_data), after log-probs and advantages",
    )
    group.add_argument(
        "--rollout-sample-filter-path",
        metavar="FN",
        help="fn(args, data) with data a list of groups of samples; may set remove_sample",
    )


def _add_cut(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rollout-top-p",
        type=finite,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens with this mass; the trainer renormalizes over them too "
        "(--rollout-engine sglang; default: %(default)g, all tokens)",
    )
    group.add_argument(
        "--rollout-top-k",
        type=int,
        default=-1,
        metavar="K",
        help="sample from the K likeliest tokens; the trainer renormalizes over them too (--rollout-engine sglang; "
        "default: %(default)s, all tokens)",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rollout-weights",
        choices=PRECISIONS,
        help="precision of the rollout engine's weights; the trainer is float32 (default: bf16)",
    )
    group.add_argument(
        "--rollout-engine",
        choices=ENGINE_NAMES,
        default="local",
        help=f"local: our own decoder; {'; '.join(f'{name}: {words}' for name, words in SERVED.items())} "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--check-weights-every",
        type=whole,
        default=0,
        metavar="N",
        help="where a run starts or resumes, and after every N updates, compare each tensor of the engine with the "
        f"trainer's, bit for bit, and stop at a difference; with --rollout-engine {' or '.join(TELLING)}; 0: never",
    )
    group.add_argument(
        "--true-on-policy",
        action="store_true",
        help="the same batch-invariant kernels on both sides: rollout and recomputed log-probs are equal to the bit",
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
    _add_staleness(group)
    _add_pace(group)
    _add_upkeep(group)
    _add_update_hooks(group)


def _add_staleness(group: argparse._ArgumentGroup) -> None:
    """Declare how far sampling may run ahead, and what new weights do to a sequence under way."""
    _needs_async(
        group,
        "--max-head-offpolicyness",
        "the most versions a token may be older than the weights that train on it; 0 is synchronous",
        type=whole,
        metavar="N",
    )
    _needs_async(
        group,
        "--max-concurrent-rollouts",
        "responses in flight at most; further prompts wait for one to end",
        type=whole,
        metavar="N",
    )
    _needs_async(
        group,
        "--pause-generation-mode",
        "what new weights do to a sequence: in_place goes on over the old keys and values, retract makes them "
        "anew, abort ends it, to be resumed from its tokens",
        choices=PAUSE_MODES,
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    """Declare the pace of an engine that is emulated."""
    _needs_async(
        group,
        "--rollout-step-seconds",
        "a decode step takes at least as long: emulates a slow engine",
        type=finite,
        metavar="S",
    )
    _needs_async(
        group,
        "--rollout-steps-per-update",
        "decode steps of a sequence between two updates, at most, while the trainer does not wait for it: so that "
        "the sequences of a small model outlive updates as those of a large one do; 0: no limit",
        type=whole,
        metavar="N",
    )


def _add_upkeep(group: argparse._ArgumentGroup) -> None:
    """Declare what an update recomputes at a time, and when a worker counts as stuck."""
    _needs_async(
        group,
        "--recompute-token-budget",
        "tokens a forward pass when the waiting samples are scored before an update",
        type=whole,
        metavar="N",
    )
    _needs_async(
        group,
        "--rollout-health-check-timeout",
        "a worker that uses no processor time for this long is stuck, and replaced; one that computes is not, "
        "unless a single step takes ten times as long",
        type=float,
        metavar="S",
    )


def _add_update_hooks(group: argparse._ArgumentGroup) -> None:
    """Declare the user's functions around a weight update."""
    for point, when in HOOK_POINTS.items():
        group.add_argument(
            f"--{point.replace('_', '-')}-hook-path",
            action="append",
            metavar="FN",
            help=f"a function without arguments, called {when}; may be given several times",
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
        type=finite,
        default=0.0,
        metavar="X",
        help="reinforce: -1 punishes failures and leaves successes alone (default: %(default)s)",
    )


def _add_clip(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("clip")
    group.add_argument("--eps-clip", type=float, default=0.2, help="PPO clip (default: %(default)s)")
    group.add_argument("--eps-clip-high", type=finite, help="upper PPO clip (default: --eps-clip)")
    group.add_argument("--eps-clip-c", type=finite, metavar="C", help="dual clip: at most -C A where A < 0")


def _add_kl(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KL loss", "Towards the policy of before the first rollout, frozen.")
    group.add_argument("--use-kl-loss", action="store_true", help="add the KL term to the loss")
    group.add_argument("--kl-loss-coef", type=finite, default=0.0, help="its factor (default: %(default)s)")
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
        type=whole,
        metavar="N",
        help="samples an optimizer step (default: the whole rollout)",
    )
    group.add_argument(
        "--micro-batch-size",
        type=whole,
        metavar="N",
        help="samples of one data-parallel rank a forward pass (default: all of its share)",
    )
    group.add_argument("--lr", type=float, default=5e-5, help="(default: %(default)s)")
    group.add_argument("--adam-beta1", type=finite, default=0.9, help="(default: %(default)s)")
    group.add_argument("--adam-beta2", type=finite, default=0.98, help="(default: %(default)s)")
    group.add_argument("--weight-decay", type=finite, default=0.0, help="(default: %(default)s)")
    group.add_argument(
        "--clip-grad",
        type=float,
        default=1.0,
        help="limit of the gradient norm; 0: none (default: %(default)s)",
    )
    group.add_argument(
        "--custom-megatron-before-log-prob-hook-path",
        metavar="FN",
        help="fn(args, model, store_prefix), before the log-probs of each policy",
    )
    group.add_argument(
        "--custom-megatron-before-train-step-hook-path",
        metavar="FN",
        help="fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), once gradients are zero",
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks", "Forked by this command, or made by torchrun.")
    _count(group, "--context-parallel-size", 1, "ranks that share each sequence")
    _count(group, "--tensor-model-parallel-size", 1, "ranks that share each matrix")
    group.add_argument(
        "--data-parallel-size",
        type=whole,
        metavar="N",
        help="ranks that share the samples (default: what torchrun started leaves, else 1)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "model", "A Qwen3-, Llama- or Qwen3-MoE-shaped decoder, under Megatron's names."
    )
    group.add_argument(
        "--qk-layernorm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="normalize query and key, as Qwen3 does; Llama does not (default: on)",
    )
    _count(group, "--hidden-size", 64)
    _count(group, "--num-layers", 2)
    _count(group, "--num-attention-heads", 4)
    _count(group, "--num-query-groups", 2)
    _count(group, "--kv-channels", 16, "size of a head")
    _count(group, "--ffn-hidden-size", 128)
    group.add_argument(
        "--num-experts", type=whole, metavar="N", help="experts of each layer (default: none, a dense model)"
    )
    group.add_argument(
        "--moe-router-topk", type=whole, metavar="N", help="experts of each token (default: 2)"
    )
    group.add_argument(
        "--moe-ffn-hidden-size",
        type=whole,
        metavar="N",
        help="width of each expert (default: --ffn-hidden-size)",
    )
