"""Ranks in processes of their own: what they compute, what is said when one fails, and that none is left."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from commands import ROOT, ProofCommand, ran

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import ORDERS
from true_on_policy.engines.protocol import Request, Sample
from true_on_policy.errors import DifferenceError
from true_on_policy.models.tiny import updated
from true_on_policy.trainers.ranks import MegatronRanks, RankError
from true_on_policy.verify import verification

CONTRACT = Contract(dtype="bf16", trainer_tensor_parallel=2, leaves=2)
SAMPLES = [
    Sample(Request((5, 6, 7), 3), (8, 9, 10), torch.zeros(3), 0),
    Sample(Request((1,), 2), (300, 2), torch.zeros(2), 0),
]


def start(tiny: Path) -> MegatronRanks:
    return MegatronRanks(tiny, CONTRACT, ORDERS["sglang"])


def test_they_take_the_weights_that_they_are_given(tiny: Path, tmp_path: Path):
    trainer, moved = start(tiny), updated(tiny, tmp_path / "1", seed=1)
    made = []
    for path in (tiny, moved, tiny):
        trainer.load(path)
        made.append(torch.cat(trainer.log_probs(SAMPLES, [1.0, 0.7])))
    trainer.close()
    assert equal_bits(made[0], made[2]) and not equal_bits(made[0], made[1])
    assert [process.is_alive() for process in trainer._processes] == [False, False]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_rank_whose_log_probs_are_not_rank_0s_is_a_difference_on_pinned_kernels(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
):
    trainer = object.__new__(MegatronRanks)
    trainer._is_pinned = pinned
    rank_0 = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    rank_1 = [rank_0[0], torch.nextafter(rank_0[1], torch.zeros(1))]
    monkeypatch.setattr(trainer, "_call", lambda *asked: [rank_0, rank_0, rank_1])
    refused = pytest.raises(DifferenceError, match=r"ranks 0 and 2 compute other .*first at \[2\].*1 ulp apart")
    with refused if pinned else nullcontext():
        assert trainer.log_probs(SAMPLES, [1.0, 1.0]) is rank_0


def test_a_difference_between_ranks_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, proof_command: ProofCommand
):
    def differs(arguments: object) -> int:
        raise DifferenceError("megatron: ranks 0 and 1 compute other log-probs")

    monkeypatch.setattr(verification, "run", differs)
    assert "ranks 0 and 1" in proof_command("verify", "--engine", "hf", "--trainer", "megatron", code=1).err


def test_what_a_rank_raises_is_said_and_ends_them_all(tiny: Path, tmp_path: Path):
    trainer = start(tiny)
    with pytest.raises(RankError, match=r"(?s)megatron, rank \d: Traceback.*no folder with \*.safetensors"):
        trainer.load(tmp_path)
    assert not any(process.is_alive() for process in trainer._processes)


def test_a_rank_that_dies_is_an_error_not_a_hang(tiny: Path):
    trainer = start(tiny)
    os.kill(trainer._processes[1].pid, signal.SIGKILL)
    with pytest.raises(RankError, match="megatron: rank 1 ended without an answer|megatron, rank 0: "):
        trainer.log_probs(SAMPLES, [1.0, 1.0])
    assert not any(process.is_alive() for process in trainer._processes)


def test_an_interrupt_of_the_terminal_is_left_to_the_driver(tiny: Path):
    """Ctrl-C reaches the ranks too: none ends by it, or prints where it was."""
    trainer = start(tiny)
    for process in trainer._processes:
        os.kill(process.pid, signal.SIGINT)
    trainer.log_probs(SAMPLES, [1.0, 1.0])
    trainer.close()


# Ranks can be forked from a process that trained in Megatron, once its groups are gone.
SCRIPT = """
import signal
from megatron.core import parallel_state as mpu
from torch.distributed import barrier
from lab.host.train.parallel import initialize, launch
from process_groups import destroy_process_groups
from true_on_policy.trainers.megatron import one_rank

one_rank()
destroy_process_groups()
assert not mpu.model_parallel_is_initialized()


def rank():
    signal.alarm(60)  # ends it where it waits
    initialize(1, 1)
    barrier()  # a rank that is done may not exit while the other still connects its last group


raise SystemExit(launch(2, rank))
"""


def test_a_rank_that_is_forked_later_waits_for_none_of_them():
    done = ran("-c", SCRIPT, seconds=200, PYTHONPATH=f"{ROOT / 'tests' / 'support'}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
