"""The command line of the embedded host: the flags of a Miles launch script, and a few of its own.

A flag is a field of one dataclass, whose type says what the flag takes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lab.host.rollout.serving import SERVING
from mis_plugins.errors import shown
from mis_plugins.shared.numerals import whole
from mis_plugins.shared.shell import add_version

PRECISIONS = ("fp32", "bf16", "int8", "int4", "int3")
TELLING = tuple(name for name, engine in SERVING.items() if engine.tells_weights)
"""Engines whose weights can be read back."""


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN; raises ArgumentTypeError for any other text."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {shown(text)}; expected a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"got {shown(text)}; expected a finite number")
    return value


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

OF_ASYNCHRONY = """\
asynchronous rollouts: A thread samples while the trainer steps, and the weights move under its sequences. Without the
loss hook only metrics use what is recomputed before an update, which takes the trainer's time all the same:
segment_wise: {enabled: false} under mis: in --custom-config-path saves it.
"""


def flag(default: Any, words: str = "", metavar: str | None = None, **more: Any) -> Any:
    """Declare a flag.

    Args:
        words: the help, to which the default is added.
        more: `size`, a whole number of at least 1; `count`, one of at least 0; `rate`, a number of at least 0;
            `choices`, where the field's type lists none; `hook`, the dotted path of a function; `later`, the default
            that `--async` fills in; `opens`, the title of the group that begins with the flag, and behind a colon what
            the group is about.
    """
    return field(default=default, metadata={"words": words, "metavar": metavar, **more})


def hook(words: str) -> Any:
    return flag(None, words, "FN", hook=True)


@dataclass
class Flags:
    """All flags, group after group."""

    output: str = flag(
        "runs/local",
        "where metrics.jsonl, summary.json and curves.png go; where an earlier run lies there and --load does not "
        "resume it, the first free one of DIR-2, DIR-3 and so on",
        "DIR",
        opens="run",
    )
    seed: int = flag(0, "of weights, prompts and samples")
    num_rollout: int = flag(200, "rollouts to train on", size=True)
    smoke: bool = flag(False, "a tiny run that only shows that everything works; overrides sizes")
    quiet: bool = flag(False, "no rows and no progress bar; the line that says where the run lies remains")

    save: str | None = flag(
        None, "write a checkpoint here, at --save-interval and at the end", "DIR", opens="checkpoint"
    )
    save_interval: int = flag(50, "rollouts between checkpoints", size=True)
    load: str | None = flag(None, "resume from the checkpoint in this folder; any layout of ranks may read it", "DIR")

    eval_interval: int = flag(5, "rollouts between evaluations of both policies", size=True, opens="evaluation")
    eval_prompts: int = flag(256, "held-out prompts, one sample each", size=True)
    grad_cosine_every: int = flag(
        0,
        "every N rollouts, compare the direction of the gradient with an on-policy one, drawn from the trainer's own "
        "weights; 0: never",
        count=True,
    )

    num_digits: int = flag(
        10,
        "digits of the string",
        size=True,
        opens="task: A string of digits to reverse; reward 1 for exactly the right answer, else 0.",
    )
    warmup_steps: int = flag(500, "supervised steps before RL", count=True)
    warmup_lr: float = flag(3e-3, "learning rate of the supervised steps", rate=True)
    warmup_cache: str | None = flag(
        None,
        "where warm-started weights are kept, so that runs to be compared start from the same ones (default: beside "
        "--output)",
        "DIR",
    )

    rollout_batch_size: int = flag(16, "prompts a rollout", size=True, opens="rollout")
    n_samples_per_prompt: int = flag(8, size=True)
    rollout_temperature: float = flag(1.0)
    rollout_top_p: float = flag(
        1.0,
        "sample from the likeliest tokens with this mass; the trainer renormalizes over them too (--rollout-engine "
        "sglang); 1 is all tokens",
        "P",
    )
    rollout_top_k: int = flag(
        -1,
        "sample from the K likeliest tokens; the trainer renormalizes over them too (--rollout-engine sglang); -1 is "
        "all tokens",
        "K",
    )
    rollout_top_logprobs_num: int = flag(
        0,
        "have the engine name its K likeliest tokens at each position, which mis.center reads (--rollout-engine local)",
        "K",
        count=True,
    )
    rollout_weights: str | None = flag(
        None, "precision of the rollout engine's weights; the trainer is float32 (default: bf16)", choices=PRECISIONS
    )
    rollout_engine: str = flag(
        "local",
        f"local: our own decoder; {'; '.join(f'{name}: {engine.words}' for name, engine in SERVING.items())}",
        choices=("local", *SERVING),
    )
    check_weights_every: int = flag(
        0,
        "where a run starts or resumes, and after every N updates, compare each tensor of the engine with the "
        f"trainer's, bit for bit, and stop at a difference; with --rollout-engine {' or '.join(TELLING)}; 0: never",
        count=True,
    )
    true_on_policy: bool = flag(
        False, "the same batch-invariant kernels on both sides: rollout and recomputed log-probs are equal to the bit"
    )
    use_rollout_routing_replay: bool = flag(
        False, "R3: the engine returns the experts that each token took, and the trainer's routers take the same ones"
    )
    rollout_data_postprocess_path: str | None = hook(
        "called as slime calls it, fn(args, rollout_id, rollout_data), after log-probs and advantages"
    )
    rollout_sample_filter_path: str | None = hook(
        "fn(args, data) with data a list of groups of samples; may set remove_sample"
    )

    asynchronous: bool = flag(False, "sample while the trainer steps", spelled="--async", opens=OF_ASYNCHRONY)
    max_head_offpolicyness: int | None = flag(
        None,
        "the most versions a token may be older than the weights that train on it; 0 is synchronous",
        count=True,
        later=2,
    )
    max_concurrent_rollouts: int | None = flag(
        None,
        "responses in flight at most; further prompts wait for one to end (default: no limit)",
        size=True,
        later=None,
    )
    pause_generation_mode: Literal["in_place", "retract", "abort"] | None = flag(
        None,
        "what new weights do to a sequence: in_place goes on over the old keys and values, retract makes them anew, "
        "abort ends it, to be resumed from its tokens",
        later="retract",
    )
    rollout_step_seconds: float | None = flag(
        None, "a decode step takes at least as long: emulates a slow engine", "S", rate=True, later=0.0
    )
    rollout_steps_per_update: int | None = flag(
        None,
        "decode steps of a sequence between two updates, at most, while the trainer does not wait for it: so that the "
        "sequences of a small model outlive updates as those of a large one do; 0: no limit",
        rate=True,
        later=0,
    )
    recompute_token_budget: int | None = flag(
        None, "tokens a forward pass when the waiting samples are scored before an update", size=True, later=8192
    )
    pre_pause_hook_path: list[str] | None = flag(None, "called before generation pauses for new weights", "FN")
    post_pause_hook_path: list[str] | None = flag(
        None, "called once nothing is generated any more, before the weights move", "FN"
    )
    pre_resume_hook_path: list[str] | None = flag(
        None, "called after the weights have moved, before generation goes on", "FN"
    )
    post_resume_hook_path: list[str] | None = flag(None, "called once generation goes on", "FN")

    use_tis: bool = flag(
        False,
        "let the hook change the loss and its masks",
        opens="correction: Of the mismatch between trainer and rollout engine, by a hook loaded as Miles loads it.",
    )
    get_mismatch_metrics: bool = flag(False, "call the hook for its metrics")
    custom_tis_function_path: str | None = hook("dotted path, e.g. mis_plugins.mis.compute_mis_weights_with_cp")
    custom_config_path: str | None = flag(
        None, "each top-level key becomes an attribute of args, as in the hosts", "YAML"
    )
    use_rollout_logprobs: bool = flag(False, "PPO against the rollout engine's log-probs, without recomputing them")

    loss_type: Literal["policy_loss", "custom_loss"] = flag(
        "policy_loss", "of the host, or of --custom-loss-function-path", opens="loss"
    )
    custom_loss_function_path: str | None = hook("fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)")
    custom_pg_loss_reducer_function_path: str | None = hook(
        "fn(total_lengths, response_lengths, masks, calculate_per_token_loss) -> a function of the policy loss of "
        "every token"
    )
    calculate_per_token_loss: bool = flag(False, "average over tokens, not over samples")

    advantage_estimator: Literal["grpo", "reinforce"] = flag(
        "grpo",
        "grpo: reward minus the mean of its prompt's group, over its deviation; reinforce: reward + --reward-shift",
        opens="advantage",
    )
    disable_grpo_std_normalization: bool = flag(False, "grpo: subtract the group's mean only")
    reward_shift: float = flag(0.0, "reinforce: -1 punishes failures and leaves successes alone", "X")

    eps_clip: float = flag(0.2, "PPO clip", rate=True, opens="clip")
    eps_clip_high: float | None = flag(None, "upper PPO clip (default: --eps-clip)")

    global_batch_size: int | None = flag(
        None, "samples an optimizer step (default: the whole rollout)", size=True, opens="optimizer"
    )
    micro_batch_size: int | None = flag(
        None, "samples of one data-parallel rank a forward pass (default: all of its share)", size=True
    )
    lr: float = flag(5e-5, rate=True)
    adam_beta1: float = flag(0.9)
    adam_beta2: float = flag(0.98)
    weight_decay: float = flag(0.0)
    clip_grad: float = flag(1.0, "limit of the gradient norm; 0: none", rate=True)
    custom_megatron_before_log_prob_hook_path: str | None = hook(
        "fn(args, model, store_prefix), before the log-probs of each policy"
    )
    custom_megatron_before_train_step_hook_path: str | None = hook(
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), once gradients are zero"
    )

    context_parallel_size: int = flag(
        1, "ranks that share each sequence", size=True, opens="ranks: Forked by this command."
    )
    tensor_model_parallel_size: int = flag(1, "ranks that share each matrix", size=True)
    data_parallel_size: int = flag(1, "ranks that share the samples", size=True)

    qk_layernorm: bool = flag(
        True,
        "normalize query and key, as Qwen3 does; Llama does not (default: on)",
        opens="model: A Qwen3-, Llama- or Qwen3-MoE-shaped decoder, under Megatron's names.",
    )
    hidden_size: int = flag(64, size=True)
    num_layers: int = flag(2, size=True)
    num_attention_heads: int = flag(4, size=True)
    num_query_groups: int = flag(2, size=True)
    kv_channels: int = flag(16, "size of a head")
    ffn_hidden_size: int = flag(128, size=True)
    num_experts: int | None = flag(None, "experts of each layer (default: none, a dense model)", size=True)
    moe_router_topk: int | None = flag(None, "experts of each token (default: 2)", size=True)
    moe_ffn_hidden_size: int | None = flag(None, "width of each expert (default: --ffn-hidden-size)", size=True)


def _kind(hint: Any) -> Any:
    """The type that a field may have beside None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(hint) else hint


KINDS = {name: _kind(hint) for name, hint in get_type_hints(Flags).items()}
"""The type of each flag's value, by the name of its field."""


def choices_of(one: Field[Any]) -> tuple[str, ...]:
    """The values that a flag chooses from; empty where the flag takes others."""
    kind = KINDS[one.name]
    return one.metadata.get("choices") or (get_args(kind) if get_origin(kind) is Literal else ())


def named(key: str) -> dict[str, Any]:
    """What `flag` was given as `key`, by the name of each field that has it."""
    return {one.name: one.metadata[key] for one in fields(Flags) if key in one.metadata}


def spelled(name: str) -> str:
    """The flag of a field."""
    return named("spelled").get(name) or "--" + name.replace("_", "-")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.host",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    group = parser.add_argument_group()
    for one in fields(Flags):
        if "opens" in one.metadata:
            title, _, about = " ".join(one.metadata["opens"].split()).partition(": ")
            group = parser.add_argument_group(title, about or None)
        group.add_argument(spelled(one.name), dest=one.name, **_taken(one))
    return parser


def _taken(one: Field[Any]) -> dict[str, Any]:
    """What argparse is told of a flag."""
    kind, words, default = KINDS[one.name], one.metadata["words"], one.metadata.get("later", one.default)
    if kind is bool:
        action = argparse.BooleanOptionalAction if one.default else "store_true"
        return {"action": action, "default": one.default, "help": words}
    shown = "" if default is None or "(default" in words else f" (default: {default})"
    told = {"default": one.default, "metavar": one.metadata["metavar"], "help": f"{words}{shown}".strip()}
    if choices := choices_of(one):
        return told | {"choices": choices}
    if kind is int:
        return told | {"type": whole, "metavar": one.metadata["metavar"] or "N"}
    if kind is float:  # a rate is refused by `parse_args`, with what it may be
        return told | {"type": float if "rate" in one.metadata or one.name == "rollout_temperature" else finite}
    return told | ({"action": "append"} if get_origin(kind) is list else {})
