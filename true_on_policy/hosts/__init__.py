"""The functions that Miles and slime load by dotted path. Wiring only.

    --custom-loss-function-path  true_on_policy.hosts.policy_loss          (with --loss-type custom_loss)
    --custom-megatron-before-train-step-hook-path  true_on_policy.hosts.report_step
    --custom-megatron-init-path  true_on_policy.hosts.miles_init

A flag of a host carries one hook, so ours stand before another: the policy loss of the host itself, or what
`bitwise.loss` and `bitwise.step_hook` name (`config.py`). Hosts are read through the adapters of `mis_plugins.hosts`,
the pack's only ones.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mis_plugins.hosts.batch import host_layout
from mis_plugins.hosts.loss import LossHost, of_reducer
from mis_plugins.packing.layout import Layout
from true_on_policy.hosts.config import BitwiseConfig
from true_on_policy.hosts.micro_batch import LayoutOf, MicroBatch
from true_on_policy.hosts.watch import COMPARISON

Batch = Mapping[str, Any]
Loss = tuple[Tensor, dict[str, Tensor]]

# The policy loss of each host, by the package that made the reducer it hands over.
OWN_LOSS = {
    "miles": "miles.backends.training_utils.loss_hub.losses.policy_loss_function",
    "slime": "slime.backends.megatron_utils.loss.policy_loss_function",
    "mis_plugins": "mis_plugins.mis.policy_loss",
}


def policy_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> Loss:
    """The host's policy loss, unchanged, and a comparison beside it: by bits, each token of the loss on its own rank.

    Compared are `rollout_log_probs` and `log_probs` of the batch. A TIS hook sees the same, but no tokens; its flag
    stays free for a correction. Inside a backward, where a recompute runs a loss again, nothing is compared.

    Returns:
        the loss; its metrics, and `true_on_policy_compared` and `true_on_policy_different`: numbers of tokens, which
        the host divides as it divides its other sums, by samples or by tokens.

    Raises:
        HostConfigError: a setting of `bitwise:`.
        ContractError: log-probs that have no bits in common.
        DifferenceError: `bitwise.on_difference: raise` without the step hook, an earlier micro-batch differed.
    """
    config, host = BitwiseConfig.from_args(args), of_reducer(sum_of_sample_mean)
    package = sum_of_sample_mean.__module__.partition(".")[0]
    wrapped = config.hook("loss") or pkgutil.resolve_name(OWN_LOSS[package])
    if torch._C._current_graph_task_id() != -1:
        return wrapped(args, batch, logits, sum_of_sample_mean)
    counts = _compared(args, batch, host, config)
    compared, different = torch.zeros(2, device=logits.device) if counts is None else counts
    loss, metrics = wrapped(args, batch, logits, sum_of_sample_mean)
    return loss, {**metrics, "true_on_policy_compared": compared, "true_on_policy_different": different}


def report_step(args: Any, rollout_id: int, step_id: int, *rest: Any) -> None:
    """The before-train-step hook: reads what the step before this one compared, after the hook that stands behind.

    Raises:
        DifferenceError: `bitwise.on_difference: raise`, and a rank found a difference; on every rank alike.
    """
    config = BitwiseConfig.from_args(args)
    wrapped = config.hook("step_hook")
    if wrapped is not None:
        wrapped(args, rollout_id, step_id, *rest)
    COMPARISON.report(args, config, (rollout_id, step_id))


def miles_init(args: Any) -> None:
    """The init hook of Miles on Megatron: pins the trainer's kernels, or keeps the trainer from starting.

    Checked first are the host's arguments, the environment, and the configs of the hooks on the other flags. What then
    runs is written where `doctor --trainer-dump` reads it: to the file that TRUE_ON_POLICY_DUMP names, else to
    `true_on_policy/trainer.json` in the folder of `--save`; ranks but the first write beside it, `trainer.rank1.json`.

    Raises:
        ContractError: an argument or a variable with which the contract cannot hold; it says what to set.
        HostConfigError, mis_plugins.errors.ConfigError: a setting under `bitwise:` or `mis:`.
        PinError, ProbeError, NotSeenError: kernels that do not pin, are not invariant, or cannot be probed here.
    """
    from true_on_policy.hosts.start import start  # the other hooks need none of the kernels

    start(args)


def _compared(args: Any, batch: Batch, host: LossHost, config: BitwiseConfig) -> Tensor | None:
    """`[2]` compared and different tokens, as numbers; None where nothing could be compared."""
    _, cp = host.parallel()
    found = MicroBatch.compare(batch, layout_of(args, batch, cp))
    COMPARISON.leave_out(len(batch["loss_masks"]) - (0 if found is None else len(found.tokens)))
    if found is None:
        return None
    COMPARISON.record(found, args, config)
    return found.flags.float()


def layout_of(args: Any, batch: Batch, cp: tuple[int, int]) -> LayoutOf:
    """Where sequences of a host's micro-batch lie; `cp` is (size, rank) of context parallelism."""

    def layout(sequences: Sequence[int]) -> Layout:
        total, response = (
            [batch[name][i] for i in sequences] for name in ("total_lengths", "response_lengths")
        )
        padded = batch.get("max_seq_lens")
        return host_layout(args, total, response, padded and [padded[i] for i in sequences], *cp)

    return layout
