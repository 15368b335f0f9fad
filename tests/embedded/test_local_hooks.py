"""The embedded host's hooks beside the TIS hook: custom loss, reducer, sample filter, train step."""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_local_loop import ALONE, LOSS_HOOK, micro_batch, records, run, settings
from test_local_parallel import GRIDS, Grid, assert_same_steps, on_ranks, on_this_rank, train
from test_local_parallel import settings as grid_settings
from test_local_true_on_policy import PUSHED
from tolerances import EPS, FP32_LOG_PROB

from lab.host.model.model import packed_logits
from lab.host.rollout.sampler import Rollout, shard
from lab.host.rollout.tasks import Task
from lab.host.train import loss
from lab.host.train.log_probs import get_log_probs_and_entropy
from lab.host.train.loss import custom_loss, policy_loss
from mis_plugins.mis import drop_broken_samples


def note(args: Namespace, name: str, line: object) -> None:
    Path(args.output).mkdir(parents=True, exist_ok=True)
    with (Path(args.output) / name).open("a") as file:
        file.write(f"{line}\n")


def noted(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines()


# ------------------------------------------------------------------------------------------------------ custom loss


def test_a_custom_loss_is_called_as_the_hosts_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    batch, _, log_probs = micro_batch(rejected=False)

    def function(*given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        calls.append(given)
        reduce = given[3]
        return 3 * given[2].sum(), {"seen": reduce(torch.arange(5.0)), "mis_kept_fraction": torch.tensor(1.5)}

    monkeypatch.setattr(loss, "load_function", lambda path, flag: function)
    args = settings(custom_loss_function_path="a.b")
    total, metrics = custom_loss(args, ALONE, batch, log_probs)
    ((handed, given, logits, _),) = calls
    assert handed is args and logits is log_probs
    names = {"log_probs": "log_probs", "rollout_log_probs": "rollout_log_probs", "unconcat_tokens": "tokens"}
    assert all(given[name] is batch.data[key] for name, key in names.items())
    assert (given["total_lengths"], given["response_lengths"]) == ([5, 4], [3, 2])
    assert given["rollout_mask_sums"].tolist() == [2, 2]
    assert total.item() == -15.0
    # (0 + 2) / 2 + (3 + 4) / 2 over the masks [1, 0, 1] and [1, 1]
    assert metrics["seen"].item() == 4.5 and metrics["kept_fraction"].item() == 1.5
    assert metrics["k3_kl"].item() > 0 and not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("grid", [Grid(), *GRIDS[:2]], ids=str)
def test_our_custom_loss_is_the_hosts_loss_with_our_tis_hook(
    grid: Grid, yaml: Path, recorded: Rollout, one_rank: dict[str, Any], tmp_path: Path
) -> None:
    """Two ways to the same gradient, over four steps: logits and helper, and log-probs and hook."""
    custom = train(grid_settings(grid, yaml, LOSS_HOOK), recorded, tmp_path)
    assert any(0 < metrics["kept_fraction"] < 1 for metrics, _ in one_rank["steps"])
    assert_same_steps(custom, one_rank, ("kept_fraction", "k3_kl", "pg_clipfrac", "mis_k3_kl"))


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=2, cp=2)], ids=str)
def test_the_helper_scores_as_the_trainer_does_and_gives_the_entropy(
    grid: Grid, yaml: Path, recorded: Rollout, tmp_path: Path
) -> None:
    args = grid_settings(grid, yaml)

    def main() -> tuple[dict[str, list[torch.Tensor]], list[torch.Tensor]]:
        state, trainer = on_this_rank(args)
        data = shard(args, state, recorded)
        names = {"unconcat_tokens": "tokens", "total_lengths": "total_lengths", "response_lengths": "response_lengths"}
        lengths = {name: data[key][:8] for name, key in names.items()}
        with torch.no_grad():
            logits = packed_logits(trainer.ddp, trainer._micro_batch(data, range(8)).layout)
            found = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **lengths)
        return found, trainer.log_probs(data)[:8]

    for found, expected in on_ranks(args, main, tmp_path):
        torch.testing.assert_close(torch.cat(found["log_probs"]), torch.cat(expected), rtol=0, atol=FP32_LOG_PROB)
        assert [part.numel() for part in found["entropy"]] == [part.numel() for part in expected]
        entropy = torch.cat(found["entropy"])
        assert ((entropy >= 0) & (entropy <= math.log(Task(args.num_digits).vocab_size) * (1 + 4 * EPS))).all()
        assert entropy.std() > 0


# ---------------------------------------------------------------------------------------------------------- reducer


@pytest.mark.parametrize("use_tis", [True, False])
def test_the_reducer_gets_the_masks_of_after_rejection(use_tis: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reduces the policy loss alone: everything else keeps the host's average."""
    batch, kept, log_probs = micro_batch(rejected=True)
    calls: list[tuple[Any, ...]] = []

    def build(*given: Any) -> Any:
        calls.append(given)
        return lambda x: 7 * x.sum()

    hooks = {"a.tis": lambda **kw: (kw["pg_loss"], kept, {}), "a.reducer": build}
    monkeypatch.setattr(loss, "load_function", lambda path, flag: hooks[path])
    args = settings(use_tis=use_tis, custom_tis_function_path="a.tis", custom_pg_loss_reducer_function_path="a.reducer")
    total, metrics = policy_loss(args, ALONE, batch, log_probs)
    ((total_lengths, response_lengths, masks, per_token),) = calls
    assert (total_lengths, response_lengths, per_token) == ([5, 4], [3, 2], False)
    assert masks is (kept if use_tis else batch.loss_masks)
    assert total.item() == pytest.approx(7 * -2 * 5)
    assert metrics["kept_fraction"].item() == pytest.approx(1.0 if use_tis else 2.0)


# ---------------------------------------------------------------------------------------------------- sample filter


def break_some(args: Namespace, data: list[list[Any]]) -> None:
    """Loses the log-probs of one sample and cuts those of another, then lets our filter find them."""
    data[0][1].rollout_log_probs = None
    data[1][0].rollout_log_probs.pop()
    drop_broken_samples(args, data)
    removed = [(sample.group_index, sample.index) for group in data for sample in group if sample.remove_sample]
    note(args, "filter", (len(data), {len(group) for group in data}, removed))


def look_at_masks(args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    dead = [index for index, mask in enumerate(rollout_data["loss_masks"]) if not mask.any()]
    if dist.get_rank() == 0:
        note(args, "masks", dead)


def test_the_sample_filter_takes_broken_samples_out_of_the_loss(tmp_path: Path) -> None:
    """Called once a rollout, whatever the ranks; what it removes has no valid token on any of them."""
    hooks = {"--rollout-sample-filter-path": "break_some", "--rollout-data-postprocess-path": "look_at_masks"}
    flags = " ".join(f"{flag} {__name__}.{name}" for flag, name in hooks.items())
    assert run(f"{flags} {PUSHED} --context-parallel-size 2", tmp_path) == 0
    assert noted(tmp_path, "filter") == ["(4, {4}, [(0, 1), (1, 4)])"] * 3
    assert noted(tmp_path, "masks") == ["[1, 4]"] * 3
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in records(tmp_path))


# ------------------------------------------------------------------------------------------------------- train step


def note_step(args: Namespace, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    (module,) = model
    clean = not any(parameter.main_grad.any() for parameter in module.parameters())
    note(args, "steps", (rollout_id, step_id, clean, isinstance(optimizer, torch.optim.Optimizer), scheduler))


def test_the_train_step_hook_is_called_once_the_gradients_are_zero(tmp_path: Path) -> None:
    """16 samples a rollout, 8 a step; the warm start is no training step of the host."""
    flag = f"--custom-megatron-before-train-step-hook-path {__name__}.note_step"
    assert run(f"{flag} {PUSHED}", tmp_path) == 0
    steps = [(rollout, step, True, True, None) for rollout in range(3) for step in range(2)]
    assert noted(tmp_path, "steps") == [str(step) for step in steps]


# ------------------------------------------------------------------------------------------------ weights


def test_holding_other_weights_gives_the_own_ones_back(yaml: Path, recorded: Rollout, tmp_path: Path) -> None:
    args = grid_settings(Grid(tp=2), yaml)

    def main() -> None:
        state, trainer = on_this_rank(args)
        before, data = trainer.weights(), shard(args, state, recorded)
        other = {name: weight * 0.5 for name, weight in before.items()}
        scores = torch.cat(trainer.log_probs(data))
        with trainer.holding(other):
            assert not torch.equal(torch.cat(trainer.log_probs(data)), scores)
        assert torch.equal(torch.cat(trainer.log_probs(data)), scores)
        assert all(torch.equal(trainer.weights()[name], weight) for name, weight in before.items())

    on_ranks(args, main, tmp_path)
