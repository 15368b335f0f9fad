"""The trainer: Megatron's model, data parallelism and gradient finalization, and an optimizer of torch.

Megatron's own optimizers need CUDA, so AdamW steps on the `main_grad` that Megatron's DDP reduced.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from lab.host.model.decoder import ModelConfig
from lab.host.model.model import Naming, build_model, packed_logits
from lab.host.model.replay import ROUTES, Replay
from lab.host.train.batch import pack
from lab.host.train.log_probs import IDS, OFFSETS, kept_sets, response_log_probs
from lab.host.train.loss import LossFunction, Metrics, MicroBatch
from lab.host.train.parallel import ParallelState
from mis_plugins.hosts.host import HEAD_IDS, HEAD_LOG_PROBS

RolloutData = dict[str, Any]
"""The hosts' `rollout_data`: lists with one entry a sample of this data-parallel rank, in training order."""
BY_SAMPLE = ("tokens", "loss_masks", "advantages", "log_probs", "rollout_log_probs", "output_versions",
             "recomputed_log_probs", ROUTES, IDS, OFFSETS, HEAD_IDS, HEAD_LOG_PROBS)  # fmt: skip
"""What a forward pass and a loss read of the rollout data, sample by sample."""


class Trainer:
    """One rank's share of the model, its gradients and its optimizer."""

    def __init__(
        self, args: Namespace, config: ModelConfig, state: ParallelState, weights: Mapping[str, Tensor], lr: float
    ) -> None:
        self.args, self.state = args, state
        model = build_model(config, state, args)
        self.replay = Replay(model)
        self.parameters = dict(model.named_parameters())
        self.naming = Naming(config, state.tp, tuple(self.parameters))
        self.load_weights(weights)
        self.ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=lr,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
            fused=True,
        )

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy whole weights, by Hugging Face name, into this rank's shards."""
        with torch.no_grad():
            for name, shard in self.naming.to_megatron(weights).items():
                self.parameters[name].copy_(shard)

    def weights(self) -> dict[str, Tensor]:
        """Whole float32 weights by Hugging Face name, copied. Collective."""
        return self.naming.to_hf({name: parameter.detach() for name, parameter in self.parameters.items()})

    @torch.no_grad()
    def log_probs(self, data: RolloutData, micro_batch_size: int | None = None) -> list[Tensor]:
        """CP-local response log-probs of every sample under the weights as they are.

        Args:
            micro_batch_size: in place of `--micro-batch-size`.
        """
        parts: list[Tensor] = []
        for indices in self.micro_batches(range(len(data["tokens"])), micro_batch_size):
            batch = self._micro_batch(data, indices)
            mask = batch.masked(batch.loss_masks) if "loss_masks" in data else None
            logits = self._logits(batch, mask)
            scores = response_log_probs(logits, batch.layout, self.args, kept_sets(batch.data))
            parts.extend(scores.split(batch.layout.local_lengths))
        return parts

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Hold other whole weights during the block, for example to score with a reference policy. Collective."""
        kept = self.weights()
        self.load_weights(weights)
        try:
            yield
        finally:
            self.load_weights(kept)

    def micro_batches(self, indices: Sequence[int], size: int | None = None) -> Iterator[Sequence[int]]:
        size = int(size or self.args.micro_batch_size)
        for start in range(0, len(indices), size):
            yield indices[start : start + size]

    def accumulate(
        self,
        args: Namespace,
        data: RolloutData,
        indices: Sequence[int],
        loss_function: LossFunction,
        begin: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Leave in every `main_grad` the gradient of the loss, averaged over the samples of all ranks. Collective.

        Args:
            args: arguments that the loss function reads.
            indices: this rank's samples; every rank passes the same number of them.
            begin: called once all gradients are zero.

        Returns:
            Metrics, averaged over the same samples (over their tokens with `--calculate-per-token-loss`).
        """
        self.ddp.zero_grad_buffer()
        begin()
        count = len(indices) * self.state.effective_dp.size
        tokens = torch.zeros((), dtype=torch.int64)
        sums: list[Metrics] = []
        for micro in self.micro_batches(indices):
            batch = self._micro_batch(data, micro)
            logits = self._logits(batch, batch.masked(batch.loss_masks))
            loss, metrics = loss_function(args, self.state, batch, logits)
            (loss * self._loss_scale(count)).backward()
            sums.append(metrics)
            tokens += sum(int(mask.sum()) for mask in batch.loss_masks)
        per_token = self.args.calculate_per_token_loss
        finalize_model_grads([self.ddp], tokens if per_token else None)
        # finalize_model_grads has summed the tokens over the ranks: each token once for every context rank.
        total = int(tokens) / self.state.cp.size if per_token else float(count)
        return self._average(sums, total)

    def _loss_scale(self, count: int) -> float:
        """Undo Megatron's DDP: it averages over all ranks, or divides by tokens counted on every context rank."""
        if self.args.calculate_per_token_loss:
            return float(self.state.cp.size)
        return self.state.effective_dp_cp.size / count

    def _average(self, sums: Sequence[Metrics], total: float) -> dict[str, float]:
        names = sorted(sums[0])
        stacked = torch.stack([torch.stack([metrics[name].double() for name in names]) for metrics in sums]).sum(0)
        dist.all_reduce(stacked, group=self.state.effective_dp_cp.group)
        return dict(zip(names, (stacked / total).tolist(), strict=True))

    def step(self) -> float:
        """Clip the accumulated gradient, step the optimizer and return the gradient norm before the clip."""
        norm = self.gradient_norm()
        limit = self.args.clip_grad
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        for parameter in self.parameters.values():
            parameter.grad = _main_grad(parameter).mul_(scale)
        self.optimizer.step()
        # .grad is main_grad itself, and DDP adds .grad to main_grad after a backward: it would count twice.
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gradient_norm(self) -> float:
        """Norm of the whole gradient: shards summed over the tensor-parallel ranks, replicas counted once."""
        sharded, replicated = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for name, parameter in self.parameters.items():
            square = _main_grad(parameter).double().square().sum()
            if self.naming.sharded(name):
                sharded += square
            else:
                replicated += square
        dist.all_reduce(sharded, group=self.state.tp.group)
        return float((sharded + replicated).sqrt())

    def gradient(self) -> Tensor:
        """The whole accumulated gradient as one float64 vector, the same in every layout. Collective."""
        whole = self.naming.to_hf({name: _main_grad(parameter) for name, parameter in self.parameters.items()})
        return torch.cat([tensor.double().flatten() for tensor in whole.values()])

    def optimizer_state(self) -> dict[str, Any]:
        """Moments by Hugging Face name, and the number of steps taken. Collective."""
        state = {name: self.optimizer.state[parameter] for name, parameter in self.parameters.items()}
        return {
            "step": float(next(iter(state.values()))["step"]),
            "exp_avg": self.naming.to_hf({name: moments["exp_avg"] for name, moments in state.items()}),
            "exp_avg_sq": self.naming.to_hf({name: moments["exp_avg_sq"] for name, moments in state.items()}),
        }

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        moments = {key: self.naming.to_megatron(saved[key]) for key in ("exp_avg", "exp_avg_sq")}
        for name, parameter in self.parameters.items():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(saved["step"]),
                **{key: shards[name].clone() for key, shards in moments.items()},
            }

    def _micro_batch(self, data: RolloutData, indices: Sequence[int]) -> MicroBatch:
        picked: RolloutData = {name: [data[name][index] for index in indices] for name in BY_SAMPLE if name in data}
        picked |= {"proximal_version": data.get("proximal_version")}
        lengths = [data["response_lengths"][index] for index in indices]
        return MicroBatch(pack(picked["tokens"], lengths, self.state.cp.rank, self.state.cp.size), picked)

    def _logits(self, batch: MicroBatch, mask: Tensor | None) -> Tensor:
        """Compute the logits of this rank, by the choice of the routers or by the routes of the rollout."""
        with self.replay.of(batch.layout, batch.data.get(ROUTES)):
            return packed_logits(self.ddp, batch.layout, mask)


def _main_grad(parameter: torch.nn.Parameter) -> Tensor:
    """The reduced gradient that Megatron's DDP hangs on a parameter."""
    return parameter.main_grad  # type: ignore[attr-defined]
