"""The RL loop: sample, recompute log-probs, correct, train, synchronise the weights, evaluate both policies."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean

import torch.distributed as dist
from torch import Tensor

from lab.host import report
from lab.host.asynchronous.measure import asynchronous_summary
from lab.host.asynchronous.source import AsynchronousRollouts
from lab.host.cli.loading import load_function
from lab.host.folders import CURVES, METRICS, SUMMARY
from lab.host.model import checkpoint
from lab.host.model.decoder import ModelConfig
from lab.host.model.engine import DecodeEngine, RolloutEngine
from lab.host.rollout.rollout_engines import kernels, rollout_engine
from lab.host.rollout.sampler import Rollout, collect, derive_seed, draw_problems, sample_responses, shard
from lab.host.rollout.tasks import Task
from lab.host.train.gradients import before_log_probs, cosine, mean_gradient, on_policy, routes_apart
from lab.host.train.loss import LOSSES
from lab.host.train.parallel import ParallelState, StopSignal, initialize
from lab.host.train.trainer import RolloutData, Trainer
from lab.host.train.warm_start import warm_start
from lab.provenance import write_json
from mis_plugins.hosts.step_report import RECORDER
from mis_plugins.shared.shell import Unread

Row = dict[str, int | float]
"""Metrics of one rollout, under the names that `report` tells and the hook's own."""

COSINE_ROLLOUTS = 4
"""Rollouts pooled into each gradient whose direction is compared."""


def model_config(args: Namespace, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab=vocab_size,
        hidden=args.hidden_size,
        layers=args.num_layers,
        heads=args.num_attention_heads,
        kv_heads=args.num_query_groups,
        head_dim=args.kv_channels,
        ffn=args.moe_ffn_hidden_size if args.num_experts else args.ffn_hidden_size,
        qk_norm=args.qk_layernorm,
        experts=args.num_experts or 0,
        top_k=args.moe_router_topk or 0,
    )


def run_rank(args: Namespace) -> None:
    """The whole run, on one rank of an initialised process group.

    Raises:
        KeyboardInterrupt: a rank was interrupted; everything was written.
    """
    import lab.host.tracking  # noqa: F401  (a hook finds it where a run is, and nowhere else)

    loop = Loop(args, initialize(args.tensor_model_parallel_size, args.context_parallel_size))
    stop = StopSignal()
    pin = kernels(args, loop.reference.config)
    with closing(loop), pin, recording(args, loop.next_rollout) as record:
        while loop.next_rollout < args.num_rollout:
            record(loop.one_rollout())
            if stop.agreed():
                loop.save()
                raise KeyboardInterrupt
        loop.save()


@contextmanager
def recording(args: Namespace, first_rollout: int) -> Iterator[Callable[[Row], None]]:
    """Yield a function to call with each rollout's record.

    Rank 0 writes the files of the run, which are complete afterwards, however the run ends.
    """
    if dist.get_rank() != 0:
        yield lambda row: None
        return
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    log = report.MetricsLog(folder / METRICS)
    log.truncate(after=first_rollout - 1)
    status = "failed"
    arguments = dict(vars(args))  # as they were given: a hook may keep its own things on args
    tell = (lambda text: None) if args.quiet else partial(print, flush=True)

    def record(row: Row) -> None:
        log.append(row)
        tell(report.row_of(row))

    try:
        tell(report.headings(folder.name, args.num_rollout))
        yield record
        status = "finished"
    except (KeyboardInterrupt, Unread):
        status = "interrupted"
        raise
    finally:
        records = log.read()
        summary = {**report.summarize(records), **asynchronous_summary(records)}
        summary |= {"status": status, "arguments": arguments}
        write_json(folder / SUMMARY, summary)
        report.draw_histories({folder.name: records}, folder / CURVES)


class Loop:
    """The parts of a run that exist from its start to its end, made from the checkpoint of `--load` or a warm start.

    `next_rollout` is also the version of the weights. `held_out` are the problems of the evaluations, and `excluded`
    their prompts. `asynchronous` is where the training samples come from with `--async`, in place of `engine`.
    """

    def __init__(self, args: Namespace, state: ParallelState) -> None:
        self.args, self.state, self.task = args, state, Task(args.num_digits)
        config = model_config(args, self.task.vocab_size)
        self.held_out = draw_problems(self.task, args.eval_prompts, derive_seed(args.seed, "held out"))
        self.excluded = frozenset(problem.prompt for problem in self.held_out)
        saved = checkpoint.load(args.load, config) if args.load else None
        weights = saved["weights"] if saved else warm_start(args, config, self.task, state, self.excluded)
        self.next_rollout: int = saved["next_rollout"] if saved else 0
        self.trainer = Trainer(args, config, state, weights, args.lr)
        if saved:
            self.trainer.load_optimizer_state(saved["optimizer"])
        path = args.rollout_data_postprocess_path
        self.postprocess = load_function(path, "--rollout-data-postprocess-path") if path else None
        self.engine, self.reference = rollout_engine(args, config), DecodeEngine(config, "fp32")
        self.asynchronous: AsynchronousRollouts | None = None
        if args.asynchronous:
            self.asynchronous = AsynchronousRollouts(
                args, self.task, config, state, self.trainer, self.excluded, weights, self.next_rollout
            )
        self.engine.update_weights(weights, self.next_rollout)
        if args.check_weights_every:
            self.check_weights(weights)

    def one_rollout(self) -> Row:
        """Sample, train, synchronise; save and evaluate when it is time. Collective."""
        began, rollout_id = time.perf_counter(), self.next_rollout
        row: Row = {"rollout": rollout_id}
        if rollout_id % self.args.eval_interval == 0:
            row |= self.evaluate()
        every = self.args.grad_cosine_every
        if every and rollout_id % every == 0:
            row |= self.gradient_cosines()
        started = time.perf_counter()
        rollout = self.sampled(rollout_id)
        sampled = time.perf_counter()
        row |= self.train(rollout_id, rollout)
        trained = time.perf_counter()
        self.next_rollout = rollout_id + 1
        row |= self.publish()
        if self.next_rollout % self.args.save_interval == 0:
            self.save()
        return (
            row
            | _rollout_row(rollout)
            | {
                "rollout_seconds": sampled - started,
                "train_seconds": trained - sampled,
                "seconds": time.perf_counter() - began,
            }
        )

    def sampled(self, rollout_id: int) -> Rollout:
        """The samples to train on next. Collective."""
        if self.asynchronous is not None:
            return self.asynchronous.rollout(rollout_id)
        return self.collect(self.engine, "rollout", rollout_id)

    def publish(self) -> Row:
        """Hand the weights to the engine or thread that samples. Collective."""
        weights = self.trainer.weights()
        self.engine.update_weights(weights, self.next_rollout)
        every = self.args.check_weights_every
        if every and self.next_rollout % every == 0:
            return self.check_weights(weights)
        if self.asynchronous is None:
            return {}
        self.asynchronous.update(weights)
        return self.asynchronous.take_row()

    def check_weights(self, weights: Mapping[str, Tensor]) -> Row:
        """Compare the engine's weights with the trainer's, which must be equal in every bit. Collective."""
        from lab.host.rollout.served import ServedEngine

        assert isinstance(self.engine, ServedEngine), "the command line asks engines that tell alone"
        return {"weights_compared": self.engine.check_weights(weights)}

    def train(self, rollout_id: int, rollout: Rollout) -> Row:
        """Take all optimizer steps of one rollout; return the means of their metrics."""
        data = shard(self.args, self.state, rollout)
        self.prepare(rollout_id, data)
        if self.asynchronous is not None:
            self.asynchronous.measure(data)
        share = self.args.global_batch_size // self.state.effective_dp.size
        steps = [range(start, start + share) for start in range(0, len(data["tokens"]), share)]
        loss = LOSSES[self.args.loss_type]
        rows = [
            self.trainer.accumulate(self.args, data, indices, loss, partial(self.begin_step, rollout_id, step_id))
            | {"grad_norm": self.trainer.step()}
            for step_id, indices in enumerate(steps)
        ]
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def begin_step(self, rollout_id: int, step_id: int) -> None:
        """Call `--custom-megatron-before-train-step-hook-path`; this trainer has no learning-rate scheduler."""
        path = self.args.custom_megatron_before_train_step_hook_path
        if path is not None:
            hook = load_function(path, "--custom-megatron-before-train-step-hook-path")
            hook(self.args, rollout_id, step_id, [self.trainer.ddp], self.trainer.optimizer, None)

    def prepare(self, rollout_id: int, data: RolloutData) -> None:
        """Compute the log-probs of the proximal policy and call the rollout-data hook, in slime's order."""
        if not self.args.use_rollout_logprobs or self.args.get_mismatch_metrics:
            before_log_probs(self.args, self.trainer)
            data["log_probs"] = self.trainer.log_probs(data)
        if self.postprocess is not None:
            self.postprocess(self.args, rollout_id, data)

    def collect(self, engine: RolloutEngine, *stream: int | str) -> Rollout:
        return collect(self.args, self.task, engine, (self.args.seed, *stream), self.excluded)

    def evaluate(self) -> Row:
        """Mean reward on held-out prompts, of the trainer's float32 policy and of the rollout policy."""
        return {"eval_trainer": self._held_out_reward(self.fp32()), "eval_rollout": self._held_out_reward(self.engine)}

    def _held_out_reward(self, engine: RolloutEngine) -> float:
        seeds = [derive_seed(self.args.seed, "evaluation", index) for index in range(len(self.held_out))]
        responses = sample_responses(engine, self.task, self.held_out, seeds, self.args.rollout_temperature)
        pairs = zip(self.held_out, responses, strict=True)
        rewards = [self.task.reward(problem, response.tokens) for problem, response in pairs]
        return sum(rewards) / len(rewards)

    def gradient_cosines(self) -> Row:
        """Cosine to the on-policy gradient at these weights, with this run's correction and without."""
        samples = (self.pool(self.fp32(), "first"), self.pool(self.reference, "second"))
        sampled = self.pool(self.engine, "cosine")
        plain = on_policy(self.args)
        settings = {"grad_cosine": self.args, "grad_cosine_uncorrected": plain}
        with unobserved(), routes_apart():
            first, second = (mean_gradient(plain, self.state, self.trainer, rollouts) for rollouts in samples)
            gradients = {
                name: mean_gradient(args, self.state, self.trainer, sampled) for name, args in settings.items()
            }
        cosines = {name: cosine(gradient, (first + second) / 2) for name, gradient in gradients.items()}
        # Two estimates agree up to sampling noise; no setting can be expected to do better.
        return cosines | {"grad_cosine_on_policy": cosine(first, second)}

    def pool(self, engine: RolloutEngine, name: str) -> list[Rollout]:
        """The rollouts whose gradients are averaged before directions are compared."""
        return [self.collect(engine, name, self.next_rollout, index) for index in range(COSINE_ROLLOUTS)]

    def fp32(self) -> DecodeEngine:
        """An engine that samples from the trainer's own policy."""
        if self.reference.version != self.next_rollout:
            self.reference.update_weights(self.trainer.weights(), self.next_rollout)
        return self.reference

    def close(self) -> None:
        """End the engine or thread that samples."""
        if self.asynchronous is not None:
            self.asynchronous.close()
        self.engine.close()

    def save(self) -> None:
        if self.args.save:
            checkpoint.save(self.args.save, self.trainer, self.reference.config, self.next_rollout)


@contextmanager
def unobserved() -> Iterator[None]:
    """Record nothing during the block, for gradients that no optimizer step applies."""
    RECORDER.record = lambda *given, **named: None
    try:
        yield
    finally:
        del RECORDER.record


def _rollout_row(rollout: Rollout) -> Row:
    return {
        "reward_rollout": fmean(sample.reward for sample in rollout.samples),
        "response_length": fmean(sample.response_length for sample in rollout.samples),
        "weight_version": int(rollout.samples[0].weight_versions[0]),
    }
