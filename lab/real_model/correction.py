"""The loss of a batch: the embedded host's own policy loss, which calls the pack's TIS hook as Miles calls it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from lab.host.cli.arguments import parse_args
from lab.host.train.batch import pack
from lab.host.train.loss import Metrics, MicroBatch, custom_loss, policy_loss
from lab.host.train.parallel import GroupInfo, ParallelState
from lab.ladder.presets_at import window_values
from lab.ladder.statistics import Pair
from lab.real_model.arms import preset
from lab.real_model.policy import NAMED, Batch
from mis_plugins.hosts.host import HEAD_IDS, HEAD_LOG_PROBS

HOOK = "mis_plugins.mis.compute_mis_weights_with_cp"
LOSS_HOOK = "--loss-type custom_loss --custom-loss-function-path mis_plugins.mis.policy_loss".split()
ALONE = GroupInfo(rank=0, size=1, group=None)
STATE = ParallelState(cp=ALONE, tp=ALONE, pp=ALONE, effective_dp=ALONE, effective_dp_cp=ALONE)
OUTSIDE = 0.05  # share of sequences on either side of a fitted window


def arguments(correction: Mapping[str, Any] | None) -> Namespace:
    """The host's arguments for a file of a correction, read and checked as its command line does.

    Args:
        correction: what stands in the file; None calls no hook.
    """
    if correction is None:
        return parse_args(["--advantage-estimator", "grpo"])
    corrects = {"weight", "reject"} & correction["mis"].keys()
    flags = ["--use-tis" if corrects else "--get-mismatch-metrics", "--custom-tis-function-path", HOOK]
    if "center" in correction["mis"]:
        flags = [*LOSS_HOOK, "--rollout-top-logprobs-num", str(NAMED)]
    with TemporaryDirectory(prefix="real-model-") as folder:
        file = Path(folder, "mis.yaml")
        file.write_text(yaml.safe_dump(dict(correction)), encoding="utf-8")
        args = parse_args(["--advantage-estimator", "grpo", *flags, "--custom-config-path", str(file)])
    args.custom_config_path = None  # the file is gone, and the arguments hold what it said
    return args


NONE = arguments(preset("metrics-only"))
"""Arguments that correct nothing."""

UNBIASED = arguments({"mis": {"weight": {"level": "sequence", "bound": "none"}}})
"""Arguments that weigh each response with its whole ratio: a gradient without bias, whatever sampled."""


def loss(args: Namespace, batch: Batch, advantages: Tensor, log_probs: Tensor) -> tuple[Tensor, Metrics]:
    """The policy loss of a batch, summed over its samples, and metrics summed in the same way.

    Args:
        advantages: `[B]`, one a response.
        log_probs: `[B, T]` of the trainer, with gradient. One step follows a rollout, so they are pi_old's too.
    """
    lengths = batch.lengths.tolist()
    sequences = zip(batch.prompts, batch.tokens, lengths, strict=True)
    tokens = [torch.cat([prompt, response[:length]]) for prompt, response, length in sequences]
    micro = MicroBatch(
        layout=pack(tokens, lengths),
        tokens=tokens,
        loss_masks=[torch.ones(length) for length in lengths],
        advantages=[advantage.expand(length) for advantage, length in zip(advantages, lengths, strict=True)],
        proximal=None,
        behavior=list(batch.behavior[batch.valid].split(lengths)),
    )
    return policy_loss(args, STATE, micro, log_probs[batch.valid])


def centered_loss(args: Namespace, batch: Batch, advantages: Tensor, logits: Tensor) -> tuple[Tensor, Metrics]:
    """The loss of the pack's loss hook, summed over samples as `loss` is.

    A prompt is cut to its last token, because the logits before that score no token of the response.

    Args:
        logits: `[B, T + 1, V]` of the trainer, with gradient.
    """
    lengths = batch.lengths.tolist()
    sequences = zip(batch.prompts, batch.tokens, lengths, strict=True)
    tokens = [torch.cat([prompt[-1:], response[:length]]) for prompt, response, length in sequences]
    micro = MicroBatch(
        layout=pack(tokens, lengths),
        tokens=tokens,
        loss_masks=[torch.ones(length) for length in lengths],
        advantages=[advantage.expand(length) for advantage, length in zip(advantages, lengths, strict=True)],
        proximal=None,
        behavior=list(batch.behavior[batch.valid].split(lengths)),
        named={
            HEAD_IDS: list(batch.named[batch.valid].split(lengths)),
            HEAD_LOG_PROBS: list(batch.named_log_probs[batch.valid].split(lengths)),
        },
    )
    packed = torch.cat([rows[: length + 1] for rows, length in zip(logits, lengths, strict=True)])
    return custom_loss(args, STATE, micro, packed[None])


def pair(batches: Sequence[Batch], log_probs: Sequence[Tensor]) -> Pair:
    """The log-probs of all responses by the sampler and by the trainer."""
    return Pair(
        behavior=torch.cat([batch.behavior[batch.valid] for batch in batches]),
        proximal=torch.cat([x[batch.valid] for batch, x in zip(batches, log_probs, strict=True)]),
        lengths=torch.cat([batch.lengths for batch in batches]),
        prompts=torch.arange(sum(len(batch.lengths) for batch in batches)),
    )


def fitted_window(measured: Pair) -> tuple[float, float]:
    """The window of `(prod r)^(1/n)` that keeps all but the outermost sequences, a twentieth on either side."""
    means = torch.tensor(window_values(measured)["ratio"]["mean"], dtype=torch.float64)
    low, high = means.quantile(torch.tensor([OUTSIDE, 1 - OUTSIDE], dtype=torch.float64)).exp().tolist()
    return low, high
