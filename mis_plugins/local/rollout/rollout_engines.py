"""The rollout engine that ``--rollout-engine`` names, and the kernels that ``--true-on-policy`` pins."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from mis_plugins.local.model.decoder import ModelConfig
from mis_plugins.local.model.engine import DecodeEngine, RolloutEngine
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.engines.protocol import Engine
from true_on_policy.kernels.pin import pinned

CACHED_TOKENS = 1 << 16
"""Slots of SGLang's key-value cache."""


def kernels(args: Namespace, config: ModelConfig) -> AbstractContextManager[None]:
    """What the RL loop runs under: batch-invariant kernels in this process, or those it finds."""
    contract = contracted(args, config)
    return nullcontext() if contract is None else pinned(contract)


def contracted(args: Namespace, config: ModelConfig) -> Contract | None:
    """What both sides keep, float32 as the trainer is; None without ``--true-on-policy``."""
    if not args.true_on_policy:
        return None
    from mis_plugins.local.rollout.served import model_shape

    return Contract(dtype="fp32", shapes=Shapes.of(model_shape(config).config(torch.float32)))


def rollout_engine(args: Namespace, config: ModelConfig) -> RolloutEngine:
    return ENGINES[args.rollout_engine](args, config)


def _local(args: Namespace, config: ModelConfig) -> RolloutEngine:
    return DecodeEngine(config, args.rollout_weights)


def _hf(args: Namespace, config: ModelConfig) -> RolloutEngine:
    from transformers.utils import logging

    from true_on_policy.engines.hf import HuggingFace

    logging.disable_progress_bar()
    return _served(config, lambda checkpoint: HuggingFace(checkpoint, args.rollout_weights))


def _sglang(args: Namespace, config: ModelConfig) -> RolloutEngine:
    from true_on_policy.engines.sglang import Pool, SGLang

    contract = contracted(args, config)
    pool = Pool(CACHED_TOKENS, running=args.rollout_batch_size * args.n_samples_per_prompt)
    return _served(config, lambda checkpoint: SGLang(checkpoint, args.rollout_weights, contract, pool=pool))


def _served(config: ModelConfig, start: Callable[[Path], Engine]) -> RolloutEngine:
    from mis_plugins.local.rollout.served import ServedEngine

    return ServedEngine(config, start)


ENGINES: dict[str, Callable[[Namespace, ModelConfig], RolloutEngine]] = {
    "local": _local,
    "hf": _hf,
    "sglang": _sglang,
}
