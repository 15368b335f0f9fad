"""The functions that Miles and slime load by dotted path; this file only wires them.

    --custom-loss-function-path  true_on_policy.hosts.policy_loss          (with --loss-type custom_loss)
    --custom-megatron-before-train-step-hook-path  true_on_policy.hosts.report_step
    --custom-megatron-init-path  true_on_policy.hosts.miles_init, or true_on_policy.hosts.prove_weights

A host's flag takes one hook, so each hook here calls a second function: the host's own policy loss, or the
hook that `bitwise.loss` or `bitwise.step_hook` names (`config.py`). Hosts are read through the records of
`mis_plugins.hosts`.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mis_plugins.config.view import view
from mis_plugins.errors import warn_once
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.registry import current
from true_on_policy.errors import HostConfigError
from true_on_policy.hosts.config import BitwiseConfig
from true_on_policy.hosts.micro_batch import MicroBatch
from true_on_policy.hosts.watch import COMPARISON

Batch = Mapping[str, Any]
Loss = tuple[Tensor, dict[str, Tensor]]
PROOF = "true_on_policy.hosts.weights"


@Hook
def policy_loss(args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]) -> Loss:
    """Compute the host's policy loss unchanged, and compare the log-probs of this rank's tokens by bits.

    The hook compares `rollout_log_probs` and `log_probs` of the batch. The comparison is not a TIS hook: a
    TIS hook gets no tokens, and its flag stays free for a correction. Inside a backward, where a recompute
    runs the loss again, nothing is compared.

    Returns:
        The loss, and its metrics with `true_on_policy_compared` and `true_on_policy_different`: numbers of tokens,
        which the host divides like its other sums, by samples or by tokens.

    Raises:
        HostConfigError: a setting under `bitwise:` cannot work.
        ContractError: the log-probs of the two sides differ in dtype, or in number from this rank's tokens.
        DifferenceError: an earlier micro-batch differed, with `bitwise.on_difference: raise` and without the step hook.
    """
    config, host = BitwiseConfig.from_args(args), current(args, sum_of_sample_mean)
    wrapped = config.hook("loss") or host.own_loss()
    if torch._C._current_graph_task_id() != -1:
        return wrapped(args, batch, logits, sum_of_sample_mean)
    _, cp = host.parallel()
    micro_batch = MicroBatch.compare(args, batch, cp)
    COMPARISON.leave_out(len(batch["loss_masks"]) - (0 if micro_batch is None else len(micro_batch.tokens)))
    if micro_batch is None:
        compared, different = torch.zeros(2, device=logits.device)
    else:
        COMPARISON.record(micro_batch, args, config)
        compared, different = micro_batch.flags.float()
    loss, metrics = wrapped(args, batch, logits, sum_of_sample_mean)
    return loss, {**metrics, "true_on_policy_compared": compared, "true_on_policy_different": different}


@Hook
def report_step(args: Any, rollout_id: int, step_id: int, *rest: Any) -> None:
    """Report the comparison of the previous step; `bitwise.step_hook`, if set, runs first.

    Raises:
        DifferenceError: a rank found a difference, with `bitwise.on_difference: raise`; every rank raises.
        HostConfigError: `bitwise.weights` asks for a proof that no init hook has begun.
    """
    config = BitwiseConfig.from_args(args)
    if config.weights and PROOF not in sys.modules:
        raise HostConfigError(
            "bitwise.weights: nothing proves the engines' weights; give --custom-megatron-init-path "
            "true_on_policy.hosts.prove_weights, or leave the key out"
        )
    if view(args).get("loss_type", "custom_loss") != "custom_loss":
        warn_once("log-probs are not compared: no --loss-type custom_loss, so that the host calls no custom loss")
    wrapped = config.hook("step_hook")
    if wrapped is not None:
        wrapped(args, rollout_id, step_id, *rest)
    COMPARISON.report(args, config, (rollout_id, step_id))


@Hook
def miles_init(args: Any) -> None:
    """Pin the trainer's kernels in the init hook of Miles on Megatron, or keep the trainer from starting.

    The hook first checks the host's arguments, the environment, and the configs of the hooks on other flags. After the
    pin it writes a dump for `doctor --trainer-dump`: to the file that TRUE_ON_POLICY_DUMP names, else to
    `true_on_policy/trainer.json` in the folder of `--save`. Other ranks write `trainer.rank1.json` and so on beside it.

    Raises:
        ContractError: the contract cannot hold with an argument or a variable; the message says what to set.
        HostConfigError, mis_plugins.errors.ConfigError: a setting under `bitwise:` or `mis:` cannot work.
        PinError, ProbeError, NotSeenError: kernels cannot be pinned, are not invariant, or cannot be probed here.
    """
    from true_on_policy.hosts.start import start  # imports the kernels, which no other hook needs

    start(args)
    if BitwiseConfig.from_args(args).weights:
        prove_weights(args)


@Hook
def prove_weights(args: Any) -> None:
    """Have the trainer of Miles or slime on Megatron prove that its engines hold its weights, in the init hook.

    Every tensor is compared by digest: before the first rollout, and with `bitwise.weights: every` after each weight
    update. `bitwise.on_difference` says whether a difference stops the run. SGLang needs TRUE_ON_POLICY_WEIGHTS=1.

    Raises:
        HostConfigError: the host, or one of its arguments, leaves no place where the trainer could compare.
    """
    from true_on_policy.hosts.weights import install  # imports the comparison of weights, which no other hook needs

    install(args)
