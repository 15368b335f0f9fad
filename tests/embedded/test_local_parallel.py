"""The trainer in every layout of ranks: one recorded batch, four optimizer steps, the same numbers."""

import gc
import multiprocessing
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import run_ranks
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from teacher_forcing import teacher_forced
from test_local_loop import TIS_HOOK, configured
from tolerances import EPS, FP32_LOG_PROB

from lab.host.cli.arguments import parse_args
from lab.host.loop import model_config
from lab.host.model.decoding import Sampling
from lab.host.model.engine import DecodeEngine
from lab.host.model.model import PackedAttention, PackedLayout, initial_weights
from lab.host.rollout.sample import make_samples
from lab.host.rollout.sampler import Rollout, derive_seed, draw_problems, shard
from lab.host.rollout.tasks import Task
from lab.host.train import parallel
from lab.host.train.batch import pack
from lab.host.train.loss import LOSSES
from lab.host.train.parallel import ParallelState
from lab.host.train.trainer import Trainer

RTOL = 1e-5  # what the project promises, relative, for four steps in any layout
LOG_RATIO = 16 * EPS  # rounding of a difference of log-probs near -3, each a few dozen operations deep
SIZES = "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 8 --num-digits 5 --hidden-size 32"


@dataclass(frozen=True)
class Grid:
    """Sizes of the parallel groups."""

    tp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def flags(self) -> str:
        sizes = {"tensor-model": self.tp, "context": self.cp, "data": self.dp}
        return " ".join(f"--{name}-parallel-size {size}" for name, size in sizes.items())


GRIDS = [Grid(cp=4), Grid(tp=2, cp=2), Grid(dp=2, cp=2)]


def settings(grid: Grid, yaml: Path, extra: str = "") -> Namespace:
    return parse_args(f"{SIZES} --lr 3e-4 {TIS_HOOK} --custom-config-path {yaml} {grid.flags} {extra}".split())


def tis(folder: Path) -> Path:
    """Write a config of token weights, none of which depends on another token."""
    configured(folder / "tis.yaml", "{weight: {level: token, bound: truncate, upper: 1.1}}")
    return folder / "tis.yaml"


def strong_weights(args: Namespace) -> dict[str, torch.Tensor]:
    """Weights large enough that int3 changes the policy and responses end early or late."""
    config = model_config(args, Task(args.num_digits).vocab_size)
    weights = initial_weights(config, seed=1)
    return {name: weight * (1 if weight.dim() == 1 else 4) for name, weight in weights.items()}


def drawn(args: Namespace, precision: str, named: int = 0) -> Rollout:
    """A rollout of an engine of this precision, with advantages of both signs.

    Args:
        named: how many of its likeliest tokens the engine names.
    """
    task = Task(args.num_digits)
    engine = DecodeEngine(model_config(args, task.vocab_size), precision)
    engine.update_weights(strong_weights(args), version=0)
    problems = [problem for problem in draw_problems(task, 8, seed=3) for _ in range(4)]
    seeds = [derive_seed("recorded", index) for index in range(len(problems))]
    sampling = Sampling(9, 1.0, task.eos, named)
    generations = engine.generate([one.prompt for one in problems], sampling, seeds)
    rewards = torch.arange(len(problems)) % 3 / 2
    return Rollout(make_samples(task, problems, generations, 4), rewards - rewards.mean())


def on_this_rank(args: Namespace) -> tuple[ParallelState, Trainer]:
    """The groups that the arguments ask for, and a trainer in them."""
    state = parallel.initialize(args.tensor_model_parallel_size, args.context_parallel_size)
    config = model_config(args, Task(args.num_digits).vocab_size)
    return state, Trainer(args, config, state, strong_weights(args), args.lr)


def on_ranks(args: Namespace, work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work` returns on each of the ranks that the arguments ask for."""
    return run_ranks(args.world_size, 1, lambda rank: work(), folder, limit_s=240, megatron=False)


def train(args: Namespace, rollout: Rollout, folder: Path, count: int = 4) -> dict[str, Any]:
    """Metrics and gradient of so many steps on a rollout, and the weights at the end."""

    def main() -> dict[str, Any]:
        state, trainer = on_this_rank(args)
        data = shard(args, state, rollout)
        data["log_probs"] = trainer.log_probs(data)
        share = args.global_batch_size // args.data_parallel_size
        steps = []
        for start in range(0, count * share, share):
            metrics = trainer.accumulate(args, data, range(start, start + share), LOSSES[args.loss_type])
            gradient = trainer.gradient()
            steps.append((metrics | {"grad_norm": trainer.step()}, gradient))
        return {"steps": steps, "weights": torch.cat([weight.flatten() for weight in trainer.weights().values()])}

    return on_ranks(args, main, folder)[0]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def assert_same_run(got: dict[str, Any], expected: dict[str, Any]) -> None:
    shared = [name for name in got["steps"][0][0] if not name.endswith("_mb")]  # those are a data-parallel rank's
    assert_same_steps(got, expected, shared)
    assert relative(got["weights"], expected["weights"]) < RTOL


def assert_same_steps(got: dict[str, Any], expected: dict[str, Any], names: Collection[str] = ()) -> None:
    """Four steps with the same loss, gradient and metrics of these names."""
    assert len(got["steps"]) == len(expected["steps"]) == 4
    for (metrics, gradient), (reference_metrics, reference) in zip(got["steps"], expected["steps"], strict=True):
        assert metrics["loss"] == pytest.approx(reference_metrics["loss"], rel=RTOL)
        for name in names:
            assert metrics[name] == pytest.approx(reference_metrics[name], rel=RTOL, abs=LOG_RATIO), name
        assert relative(gradient, reference) < RTOL


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_four_steps_agree_in_every_layout(
    grid: Grid, yaml: Path, recorded: Rollout, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_run(train(settings(grid, yaml), recorded, tmp_path), one_rank)


def test_the_recorded_batch_exercises_the_correction(one_rank: dict[str, Any], recorded: Rollout) -> None:
    """Else the layouts would agree about nothing: ragged responses, weights that truncate, sequences dropped."""
    metrics = [metrics for metrics, _ in one_rank["steps"]]
    assert len({sample.response_length for sample in recorded.samples}) > 2
    assert all(step["mis_tis_truncate_fraction"] > 0 for step in metrics)
    assert any(0 < step["kept_fraction"] < 1 for step in metrics)
    assert metrics[-1]["pg_clipfrac"] > 0


def test_per_token_loss_agrees_across_ranks(yaml: Path, recorded: Rollout, tmp_path: Path) -> None:
    one, four = (settings(grid, yaml, "--calculate-per-token-loss") for grid in (Grid(), Grid(dp=2, cp=2)))
    assert_same_run(train(four, recorded, tmp_path / "four"), train(one, recorded, tmp_path / "one"))


def test_micro_batches_do_not_change_a_loss_without_normalization(recorded: Rollout, tmp_path: Path) -> None:
    whole, split = (
        train(settings(Grid(), tis(tmp_path), flags), recorded, tmp_path / name)
        for name, flags in {"whole": "", "split": "--micro-batch-size 2"}.items()
    )
    assert_same_steps(split, whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_engine_scores_with_exported_weights_as_the_trainer_does(
    tp: int, yaml: Path, recorded: Rollout, tmp_path: Path
) -> None:
    """Two forward passes that share no code: names, the interleaving of q, k and v, RoPE and norms all agree."""
    args = settings(Grid(tp=tp), yaml)

    def main() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        state, trainer = on_this_rank(args)
        return trainer.weights(), torch.cat(trainer.log_probs(shard(args, state, recorded)))

    weights, scores = on_ranks(args, main, tmp_path)[0]
    assert all(torch.equal(weights[name], weight) for name, weight in strong_weights(args).items())
    engine = DecodeEngine(model_config(args, Task(args.num_digits).vocab_size), "fp32")
    engine.update_weights(weights, version=0)
    sequences = [tuple(sample.tokens) for sample in recorded.samples]
    expected = teacher_forced(engine, sequences, [sample.response_length for sample in recorded.samples])
    torch.testing.assert_close(scores, torch.cat(expected), rtol=0, atol=FP32_LOG_PROB)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_ranks_of_a_pack_share_out_every_response_token_once(cp: int) -> None:
    lengths = [(1, 1), (4, 3), (30, 2), (2, 29), (5, 0)]
    tokens = [torch.arange(prompt + response) + 100 * i for i, (prompt, response) in enumerate(lengths)]
    layouts = [pack(tokens, [response for _, response in lengths], rank, cp) for rank in range(cp)]
    everything = torch.cat([sequence[prompt:] for sequence, (prompt, _) in zip(tokens, lengths, strict=True)])
    owned = torch.cat([layout.response_index for layout in layouts])
    assert sorted(owned.tolist()) == list(range(len(everything)))
    for layout in layouts:
        assert torch.equal(layout.targets, everything[layout.response_index])
        assert torch.equal(layout.tokens[layout.scored] + 1, layout.targets)
        assert sum(layout.local_lengths) == len(layout.targets)
    assert len({len(layout.tokens) for layout in layouts}) == 1, "every rank holds the same number of slots"


def test_packed_attention_is_causal_attention_within_each_sequence(tmp_path: Path) -> None:
    """Two context ranks against one plain SDPA a sequence, forward and backward."""
    torch.manual_seed(0)
    lengths = [7, 1, 12]
    query, key, value = (torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2))

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        k = key.clone().requires_grad_()
        outputs = []
        for q, k_one, v in zip(query.split(lengths), k.split(lengths), value.split(lengths), strict=True):
            q, k_one, v = (x.transpose(0, 1).repeat_interleave(4 // x.shape[1], 0) for x in (q, k_one, v))
            attended = F.scaled_dot_product_attention(q, k_one, v, is_causal=True)
            outputs.append(attended.transpose(0, 1).flatten(1))
        out = torch.cat(outputs)
        out.square().sum().backward()
        assert k.grad is not None
        return out.detach(), k.grad

    def main(rank: int) -> tuple[torch.Tensor, ...]:
        layout = pack([torch.arange(n) for n in lengths], [0] * 3, rank, 2)
        real = layout.positions < torch.tensor(lengths)[layout.sequence]
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        place = torch.where(real, starts[layout.sequence] + layout.positions, 0)
        k = key[place].requires_grad_()
        attention = PackedAttention(Namespace(kv_channels=8), ProcessGroupCollection.use_mpu_process_groups())
        out = attention(query[place], k, value[place], None, packed_seq_params=PackedLayout.of(layout))
        out[real].square().sum().backward()
        assert k.grad is not None
        return place[real], out[real].detach(), k.grad[real]

    expected_out, expected_grad = reference()
    for place, out, gradient in run_ranks(2, 2, main, tmp_path):
        torch.testing.assert_close(out, expected_out[place])
        torch.testing.assert_close(gradient, expected_grad[place])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["start", "join", "gap", "groups"])
def test_ctrl_c_while_ranks_connect_ends_all_of_them(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one process hears it at that place; no rank waits for one that has left."""

    def interrupted(where: str, call: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def heard(*args: Any, **more: Any) -> Any:
            done = call(*args, **more) if after else None
            if where == place:
                with suppress(FileExistsError):
                    (tmp_path / "first").touch(exist_ok=False)
                    signal.raise_signal(signal.SIGINT)
            return done if after else call(*args, **more)

        return heard

    def main() -> None:
        interrupted("gap", lambda: None)()
        parallel.initialize(1, 2)
        torch.distributed.barrier()
        time.sleep(1000 if place == "start" else 0)
        torch.distributed.barrier()

    starts, groups = parallel.start_processes, mpu.initialize_model_parallel
    monkeypatch.setattr(parallel, "start_processes", interrupted("start", starts, after=True))
    monkeypatch.setattr(parallel, "on_loopback", interrupted("join", parallel.on_loopback))
    monkeypatch.setattr(mpu, "initialize_model_parallel", interrupted("groups", groups))
    assert parallel.launch(2, main) == 130


def launch_over_a_left_group() -> None:
    """Launch ranks that collect garbage, in a process whose garbage holds a process group."""

    def main() -> None:
        gc.collect()

    gc.disable()
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    garbage: list[Any] = [dist.group.WORLD]
    garbage.append(garbage)
    del garbage, store
    dist.destroy_process_group()
    sys.exit(parallel.launch(2, main))


def test_a_rank_waits_for_no_thread_of_the_launchers() -> None:
    """The destructor of an inherited process group would join a thread that only the launcher has."""
    launcher = multiprocessing.get_context("fork").Process(target=launch_over_a_left_group)
    launcher.start()
    launcher.join(timeout=60)
    launcher.kill()
    assert launcher.exitcode == 0
