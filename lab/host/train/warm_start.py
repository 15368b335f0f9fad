"""Supervised steps before RL, so that the first rollouts earn rewards; runs to be compared share the result."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lab.host.model.decoder import ModelConfig
from lab.host.model.model import initial_weights
from lab.host.rollout.sampler import derive_seed, draw_problems, training_order
from lab.host.rollout.tasks import Problem, Task
from lab.host.train.loss import of_log_probs, supervised_loss
from lab.host.train.parallel import ParallelState, of_rank_0
from lab.host.train.trainer import RolloutData, Trainer
from lab.provenance import tracked
from mis_plugins.shared.files import replaced

BATCH = 64


def warm_start(
    args: Namespace, config: ModelConfig, task: Task, state: ParallelState, excluded: Collection[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Weights after `--warmup-steps` supervised steps on right answers, or from the cache of an equal run. Collective.

    Args:
        excluded: the prompts that are held out.
    """
    path = cache_path(args, config)
    cached = of_rank_0(torch.load(path, weights_only=True) if dist.get_rank() == 0 and path.is_file() else None)
    if cached is not None:
        return cached
    weights = _trained(args, config, task, state, excluded)
    if dist.get_rank() == 0:
        with replaced(path) as partial:
            torch.save(weights, partial)
    return weights


def _trained(
    args: Namespace, config: ModelConfig, task: Task, state: ParallelState, excluded: Collection[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Train fresh weights, with cosine decay: the end does not depend on the last few batches."""
    ranks = state.effective_dp
    plain = {"micro_batch_size": BATCH, "weight_decay": 0.0, "use_rollout_routing_replay": False}
    settings = Namespace(**{**vars(args), **plain})
    trainer = Trainer(settings, config, state, initial_weights(config, args.seed), args.warmup_lr)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, max(1, args.warmup_steps))
    mine = training_order(BATCH, BATCH, ranks.rank, ranks.size)
    for step in tracked(range(args.warmup_steps), "warm start", args.quiet or dist.get_rank() != 0):
        seed = derive_seed(args.seed, "warm start", step)
        problems = draw_problems(task, BATCH, seed, excluded)
        data = answers([problems[index] for index in mine])
        trainer.accumulate(settings, data, range(len(mine)), of_log_probs(supervised_loss))
        trainer.step()
        decay.step()
    return trainer.weights()


def cache_path(args: Namespace, config: ModelConfig) -> Path:
    """One file for each task, seed, model and length of the warm start."""
    folder = Path(args.warmup_cache) if args.warmup_cache else Path(args.output).parent / "warm-start"
    recipe = (
        config,
        args.seed,
        args.warmup_steps,
        args.warmup_lr,
        args.rollout_temperature,
        args.clip_grad,
        args.calculate_per_token_loss,
        args.adam_beta1,
        args.adam_beta2,
        args.eval_prompts,
    )
    digest = hashlib.blake2b(repr(recipe).encode(), digest_size=6).hexdigest()
    return folder / f"reverse{args.num_digits}-seed{args.seed}-steps{args.warmup_steps}-{digest}.pt"


def answers(problems: list[Problem]) -> RolloutData:
    """Training data whose responses are the right answers."""
    return {
        "tokens": [torch.tensor(problem.prompt + problem.answer) for problem in problems],
        "response_lengths": [len(problem.answer) for problem in problems],
        "loss_masks": [torch.ones(len(problem.answer), dtype=torch.int) for problem in problems],
    }
