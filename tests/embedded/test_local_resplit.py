"""The trainer against itself in the embedded host: 0 exactly under kernels that do not depend on the batch."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from test_local_loop import configured, numbers, run

from lab.host.folders import STEPS
from lab.host.train.trainer import Trainer

HOOK = "--rollout-data-postprocess-path mis_plugins.mis.count_samples"
DIFFERS, LARGEST = "train/mis_step/resplit_differs", "train/mis_step/resplit_diff_abs_max"


def resplit(flags: str, output: Path, every: int = 1, **settings: int) -> list[dict[str, float]]:
    """What a run of three rollouts, two steps each, tells of its second log-prob passes."""
    file = configured(output.with_suffix(".yaml"), f"{{resplit_every: {every}}}")
    assert run(f"{HOOK} {file} {flags}", output, **settings) == 0
    steps = output / STEPS
    return [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []


@pytest.mark.parametrize(
    ("flags", "size"), [("", 1), ("--data-parallel-size 2", 4), ("--context-parallel-size 2 --num-experts 4", 4)]
)
def test_batch_invariant_kernels_score_alike_at_every_split(flags: str, size: int, tmp_path: Path) -> None:
    told = resplit(f"--true-on-policy {flags}", tmp_path / "run", micro_batch_size=size)
    assert [one["train/step"] for one in told] == [0, 2, 4]
    assert [(one[DIFFERS], one[LARGEST]) for one in told] == [(0, 0)] * 3


def lean(args: Namespace, model: Any, prefix: str) -> None:
    """A before-log-prob hook that plants a dependence on the batch: logits grow with the tokens beside them."""
    (part,) = model
    if not getattr(part, "leans", False):
        part.leans = True
        part.register_forward_hook(lambda module, given, logits: logits * (1 + 1e-4 * logits.shape[1]))


def test_a_planted_dependence_on_the_batch_is_told(tmp_path: Path) -> None:
    planted = "--custom-megatron-before-log-prob-hook-path test_local_resplit.lean --data-parallel-size 2"
    told = resplit(f"--true-on-policy {planted}", tmp_path / "run", micro_batch_size=4)
    assert [one[DIFFERS] > 0.9 and one[LARGEST] > 1e-4 for one in told] == [True] * 3, told


def test_it_costs_one_pass_in_so_many_rollouts_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = tmp_path / "passes"
    own = Trainer.log_probs

    def noted(self: Trainer, data: Any, size: int | None = None) -> Any:
        with passes.open("a") as file:  # of a forked rank
            file.write(f"{size}\n")
        return own(self, data, size)

    monkeypatch.setattr(Trainer, "log_probs", noted)
    told = resplit("", tmp_path / "asked", every=2, micro_batch_size=4)
    assert [one["train/step"] for one in told] == [0, 4]
    assert passes.read_text().split() == ["None", "2", "None", "None", "2"]
    assert run("", tmp_path / "plain", micro_batch_size=4) == 0
    assert numbers(tmp_path / "asked") == numbers(tmp_path / "plain")
