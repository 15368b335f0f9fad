"""The rollout engine that `--rollout-engine` names, and the kernels that `--true-on-policy` pins."""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext

import torch

from lab.host.model.decoder import ModelConfig
from lab.host.model.engine import DecodeEngine, RolloutEngine
from lab.host.rollout.serving import SERVING
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.engines.protocol import Cut
from true_on_policy.kernels.pin import pinned


def kernels(args: Namespace, config: ModelConfig) -> AbstractContextManager[None]:
    """Context of the RL loop: batch-invariant kernels with `--true-on-policy`, else torch's own."""
    contract = contracted(args, config)
    return nullcontext() if contract is None else pinned(contract)


def contracted(args: Namespace, config: ModelConfig) -> Contract | None:
    """The contract of trainer and engine, in float32 as the trainer; None without `--true-on-policy`."""
    if not args.true_on_policy:
        return None
    from true_on_policy.models.tiny import config_of

    shapes = Shapes.of(config_of(config.family, config, torch.float32))
    return Contract(dtype="fp32", shapes=shapes)


def rollout_engine(args: Namespace, config: ModelConfig) -> RolloutEngine:
    """Our own decoder, or an engine of `true_on_policy` that can serve a training loop.

    With `--async` this engine only evaluates. Our own decoder then takes the place of a served engine, as a
    second server would cost as much again.
    """
    if args.rollout_engine == "local" or args.asynchronous:
        return DecodeEngine(config, args.rollout_weights)
    from transformers.utils import logging

    from lab.host.rollout.served import ServedEngine

    logging.disable_progress_bar()
    serve = SERVING[args.rollout_engine].start
    contract, running = contracted(args, config), args.rollout_batch_size * args.n_samples_per_prompt
    start = lambda checkpoint: serve(checkpoint, args.rollout_weights, contract, running)  # noqa: E731
    return ServedEngine(config, start, cut_of(args))


def cut_of(args: Namespace) -> Cut | None:
    """The cut of `--rollout-top-p` and `--rollout-top-k`; None where both leave the whole vocabulary."""
    top_k = None if args.rollout_top_k == -1 else args.rollout_top_k
    return None if args.rollout_top_p == 1 and top_k is None else Cut(args.rollout_top_p, top_k)
