"""A unit of the experiment: one arm with one seed, from the pretrained weights to the last rollout."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lab.host.rollout.sampler import derive_seed
from lab.host.train.advantages import ESTIMATORS
from lab.ladder.statistics import Pair, k3
from lab.real_model.arms import FITTED, Arm, preset, window
from lab.real_model.correction import NONE, UNBIASED, arguments, centered_loss, fitted_window, loss, pair
from lab.real_model.directions import cosines, gram
from lab.real_model.policy import Batch, Trainer, decoded, log_probs_of, on_policy
from lab.real_model.task import Problem, Task, last_number, reward
from true_on_policy.models import hf_decoder


@dataclass(frozen=True)
class Recipe:
    """What all units share.

    Attributes:
        rollouts: optimizer steps; one rollout makes one step.
        prompts, samples: prompts of a rollout, and responses to each.
        length: tokens of a response, at most.
        batch: responses that are sampled and scored together.
        evaluated: rollouts between two evaluations.
        asked: responses to each held-out prompt.
        directed: rollouts before which the gradient's direction is measured; where every answer is right there is none.
        direction_prompts, direction_samples: prompts of a direction, and responses to each in every set.
        layers: the last layers, whose gradients are compared.
    """

    lr: float = 5e-6
    rollouts: int = 60
    prompts: int = 16
    samples: int = 4
    length: int = 24
    batch: int = 32
    evaluated: int = 10
    asked: int = 4
    directed: tuple[int, ...] = (0, 10, 20, 40)
    direction_prompts: int = 16
    direction_samples: int = 16
    layers: int = 4


Row = dict[str, Any]
Sampler = Callable[[Tensor, Sequence[int]], Batch]
"""Samples a response to each of `[B, P]` prompts, each response with a seed of its own."""


@dataclass
class Unit:
    """The parts of a unit while it runs.

    Attributes:
        engine: the model that samples with a cache; None where the trainer samples by its own pass.
        correction: what stands in the file of the arm's correction; None calls no hook.
        args: the arguments that the policy loss and the hook read.
    """

    arm: Arm
    seed: int
    recipe: Recipe
    task: Task
    trainer: Trainer
    engine: Any | None
    correction: Mapping[str, Any] | None = None
    args: Namespace = field(default_factory=lambda: NONE)

    @classmethod
    def start(cls, arm: Arm, seed: int, recipe: Recipe, task: Task, checkpoint: Path) -> Unit:
        """Load trainer and engine; a window is fitted to the first rollout's prompts, which do not train here."""
        torch.manual_seed(seed)
        trainer = Trainer(checkpoint, recipe.lr)
        engine = None
        if arm.rung is not None:
            engine = hf_decoder.load(checkpoint, "bf16") if arm.rounding else trainer.model
        unit = cls(arm, seed, recipe, task, trainer, engine)
        unit._hand_over()
        unit.correction = unit._correction()
        unit.args = arguments(unit.correction)
        return unit

    def _correction(self) -> Mapping[str, Any] | None:
        """What stands in the file of the arm's correction."""
        name = self.arm.correction
        if name == FITTED:
            return window(*self._fitted())
        return None if name is None else preset(name)

    @torch.no_grad()
    def _fitted(self) -> tuple[float, float]:
        """The window of the mismatch before training."""
        problems = self.problems("window", 0, self.recipe.prompts)
        batches = self.sampled(self.of_arm, problems, self.recipe.samples, "window", 0)
        scored = [self.trainer.log_probs(batch.prompts, batch.tokens) for batch in batches]
        return fitted_window(pair(batches, scored))

    def run(self, tell: Callable[[int], None]) -> dict[str, Any]:
        """Train, and return the record's numbers; `tell` hears how many rollouts are done."""
        began, rows = time.process_time(), []
        course: dict[str, list[Any]] = {"held_out": [], "directions": []}
        for index in range(self.recipe.rollouts + 1):
            last = index == self.recipe.rollouts
            if index % self.recipe.evaluated == 0 or last:
                course["held_out"].append({"rollout": index, **self.evaluate()})
            if index in self.recipe.directed:
                course["directions"].append({"rollout": index, **self.directions(index)})
            if not last:
                rows.append({"rollout": index, **self.rollout(index)})
                tell(index + 1)
        return {**course, "rollouts": rows, "cpu_seconds": round(time.process_time() - began)}

    def rollout(self, index: int) -> Row:
        """Sample, train one step, and hand the weights over."""
        problems = self.problems("rollout", index, self.recipe.prompts)
        batches = self.sampled(self.of_arm, problems, self.recipe.samples, "rollout", index)
        rewards = self.rewards(batches, problems)
        advantages = ESTIMATORS["grpo"](self.args, rewards).flatten().split(self.recipe.batch)
        count, sums, scored = rewards.numel(), Counter[str](), []
        for batch, advantage in zip(batches, advantages, strict=True):
            logits = self.trainer.logits(batch.prompts, batch.tokens)
            log_probs = log_probs_of(logits, batch.tokens)
            if self.arm.centered:
                total, metrics = centered_loss(self.args, batch, advantage, logits)
            else:
                total, metrics = loss(self.args, batch, advantage, log_probs)
            (total / count).backward()
            self.trainer.collect()
            sums.update({name: float(value) for name, value in metrics.items()})
            scored.append(log_probs.detach())
        kept = sums.get("kept_fraction", count) / count  # nothing is rejected where the loss hook names no share
        centering = {n: x / count for n, x in sums.items() if "center" in n}
        found = {"reward": float(rewards.mean()), "kept": kept, **centering, **_mismatch(pair(batches, scored))}
        found |= {"formatted": self.formatted(batches), "grad_norm": self.trainer.step()}
        self._hand_over()
        return found

    def evaluate(self) -> Row:
        """Accuracy and format of the trainer's policy on the held-out prompts; equal seeds at every time."""
        problems = self.task.held_out
        sampler = partial(self._decoded, self.trainer.model)
        batches = self.sampled(sampler, problems, self.recipe.asked, "held out", 0)
        return {
            "accuracy": float(self.rewards(batches, problems).mean()),
            "format": self.formatted(batches),
            "length": float(torch.cat([batch.lengths for batch in batches]).double().mean()),
        }

    def directions(self, index: int) -> Row:
        """Cosines of the arm's gradient with the on-policy one at these weights, with intervals over prompts.

        `arm` and `uncorrected` are of one set of samples, with the arm's correction and without. The two on-policy
        halves are decoded from the trainer's weights and weighted with `UNBIASED`.
        """
        problems = self.problems("direction", index, self.recipe.direction_prompts)
        watched = list(self.trainer.model.model.layers[-self.recipe.layers :].parameters())
        own = partial(self._decoded, self.trainer.model)
        sets = (
            (own, {"first": UNBIASED}),
            (own, {"second": UNBIASED}),
            (self.of_arm, {"arm": self.args, "uncorrected": NONE}),
        )
        found: dict[str, list[Tensor]] = {}
        for number, (sampler, corrections) in enumerate(sets):
            batches = self.sampled(sampler, problems, self.recipe.direction_samples, f"direction {number}", index)
            found |= self._gradients(watched, batches, problems, corrections)
        products = gram([one for gradients in found.values() for one in gradients])
        return cosines(products, [*found], len(problems))

    def problems(self, stream: str, index: int, count: int) -> list[Problem]:
        """Training problems in a random order, each at most once where there are enough."""
        random = torch.Generator().manual_seed(derive_seed(self.seed, stream, index))
        order = torch.randperm(len(self.task.training), generator=random).tolist()
        return [self.task.training[place] for place in islice(cycle(order), count)]

    def rewards(self, batches: Sequence[Batch], problems: Sequence[Problem]) -> Tensor:
        """`[prompts, samples]` rewards of responses, the samples of a prompt one after the other."""
        texts = self._texts(batches)
        samples = len(texts) // len(problems)
        asked = [problem for problem in problems for _ in range(samples)]
        found = [reward(problem, text) for problem, text in zip(asked, texts, strict=True)]
        return torch.tensor(found).view(len(problems), samples)

    def formatted(self, batches: Sequence[Batch]) -> float:
        """The share of responses with a number."""
        return fmean(last_number(text) is not None for text in self._texts(batches))

    def _texts(self, batches: Sequence[Batch]) -> list[str]:
        return [self.task.text(response) for batch in batches for response in batch.responses()]

    def sampled(
        self, sampler: Sampler, problems: Sequence[Problem], samples: int, stream: str, index: int
    ) -> list[Batch]:
        """Responses to the problems; the seed of each follows from its place in its stream."""
        rows = [problem.prompt for problem in problems for _ in range(samples)]
        seeds = [derive_seed(self.seed, stream, index, place) for place in range(len(rows))]
        parts = [slice(start, start + self.recipe.batch) for start in range(0, len(rows), self.recipe.batch)]
        return [sampler(torch.tensor(rows[part]), seeds[part]) for part in parts]

    def of_arm(self, prompts: Tensor, seeds: Sequence[int]) -> Batch:
        """Sample as the arm does."""
        if self.engine is None:
            return self._own_pass(prompts, seeds)
        return self._decoded(self.engine, prompts, seeds)

    def _own_pass(self, prompts: Tensor, seeds: Sequence[int]) -> Batch:
        return on_policy(self.trainer, prompts, seeds, self.recipe.length, self.task.end)

    def _decoded(self, model: Any, prompts: Tensor, seeds: Sequence[int]) -> Batch:
        return decoded(model, prompts, seeds, self.recipe.length, self.task.end)

    def _hand_over(self) -> None:
        """Give the engine the trainer's weights; an engine in bf16 is the trainer's model itself."""
        if self.arm.rounding:
            self.trainer.hand_over(self.engine, self.arm.rounding)

    def _gradients(
        self,
        watched: Sequence[torch.nn.Parameter],
        batches: Sequence[Batch],
        problems: Sequence[Problem],
        corrections: Mapping[str, Namespace],
    ) -> dict[str, list[Tensor]]:
        """The policy gradient of each prompt's responses, by the name of a correction."""
        rewards = self.rewards(batches, problems)
        samples = rewards.shape[1]
        groups = [group for batch in batches for group in batch.split(samples)]
        found: dict[str, list[Tensor]] = {name: [] for name in corrections}
        for group, advantages in zip(groups, ESTIMATORS["grpo"](NONE, rewards), strict=True):
            log_probs = self.trainer.log_probs(group.prompts, group.tokens)
            for name, args in corrections.items():
                total, _ = loss(args, group, advantages, log_probs)
                parts = torch.autograd.grad(total, watched, retain_graph=True)
                found[name].append(torch.cat([part.flatten() for part in parts]))
        return found


def _mismatch(found: Pair) -> Row:
    """k3 a token, the perplexities of both sides, and how many tokens have equal bits on both."""
    log_ratio = found.log_ratio
    return {
        "k3": float(k3(log_ratio).mean()),
        "trainer_ppl": math.exp(-float(found.proximal.double().mean())),
        "rollout_ppl": math.exp(-float(found.behavior.double().mean())),
        "tokens": len(log_ratio),
        "equal": int((found.proximal == found.behavior).sum()),
    }
