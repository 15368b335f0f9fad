"""A data-parallel peer is killed within a step: what the survivor's loss and report make of it."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from drive import same_bytes
from test_recorder import Cells

from mis_plugins.config.reading import from_mapping
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.hosts.step_report import Recorder
from mis_plugins.packing.collectives import discard_step
from mis_plugins.packing.ragged import Ragged, Ranks
from mis_plugins.routing.report import _summed

Wrap = Callable[[dist.ProcessGroup], dist.ProcessGroup]
LOG_RATIOS = torch.tensor([[0.5, -1.0, 0.1], [0.4, 0.6, -2.0]])


class Fault(dist.ProcessGroup):
    """A group of torchft's around a real one: it raises as that one does, and tells its error afterwards."""

    def __init__(self, inner: dist.ProcessGroup):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self.error = inner, None

    def size(self) -> int:
        return self.inner.size()

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions) -> None:  # type: ignore[override]
        try:
            self.inner.allreduce(tensors, opts).wait()
        except RuntimeError as error:
            self.error = error
            raise

    def errored(self) -> Exception | None:
        return self.error


class Silent(Fault):
    """A group of torchft's over gloo tells no error; one that was aborted has no group inside."""

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions) -> dist.Work | None:  # type: ignore[override]
        assert self.inner is not None, "process group not initialized"
        return self.inner.allreduce(tensors, opts)

    def errored(self) -> None:
        return None

    def abort(self) -> None:
        self.inner = None  # type: ignore[assignment]


class Vain(Silent):
    """A group of torchft's over NCCL may say that it did not wait, in place of an error."""

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions) -> dist.Work | None:  # type: ignore[override]
        try:
            super().allreduce(tensors, opts).wait()  # type: ignore[union-attr]
        except RuntimeError:
            return SimpleNamespace(wait=lambda: False)  # type: ignore[return-value]
        return None


def corrected(scope: str, ranks: Ranks, row: int) -> Correction:
    config = from_mapping({"weight": {"upper": 2.0, "normalize": {"scope": scope}}, "metrics": "all"})
    ragged = Ragged(torch.tensor([0, 3]), torch.tensor([True, True, True]), ranks)
    return correct(LOG_RATIOS[row], torch.zeros(3), ragged, config)


def _work(rank: int, folder: Path, wrap: Wrap) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    ranks = Ranks(dp=wrap(group))
    recorder, args = Recorder(), SimpleNamespace()
    recorder.report(args, 0, 0, ranks)
    before = corrected("data_parallel", ranks, rank).weights
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        after = [corrected("data_parallel", ranks, row) for row in (0, 1)]
        recorder.record(after[0])
        recorder.report(args, 1, 0, ranks)
        said: object = [x.weights for x in after]
    except RuntimeError as error:
        said = str(error)
    torch.save((before, said), folder / "survivor.pt")
    os._exit(0)


def survivor(folder: Path, wrap: Wrap) -> tuple[torch.Tensor, list[torch.Tensor] | str]:
    """What rank 0 found: the weights of a micro-batch with its peer, and of two after the peer's death."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_work, args=(rank, folder, wrap)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        process.kill()
    assert processes[1].exitcode == -signal.SIGKILL
    return torch.load(folder / "survivor.pt")


@pytest.mark.parametrize("wrap", [Fault, Silent, Vain])
def test_the_survivor_finishes_the_attempt_with_its_own_mean(tmp_path: Path, wrap: Wrap):
    """Before the death the mean was that of both ranks. The report of the step raises nothing either."""
    before, after = survivor(tmp_path, wrap)
    alone = [corrected("micro_batch", Ranks(), row).weights for row in (0, 1)]
    assert not torch.allclose(before, alone[0])
    for found, expected in zip(after, alone, strict=True):
        assert isinstance(found, torch.Tensor) and same_bytes(found, expected)


class Abortable(Cells):
    """A group of torchft's that can be aborted."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("tells_error", [False, True])
def test_a_group_that_tells_no_error_is_aborted(tells_error: bool):
    """Miles then finds the error, or fails in the sum of gradients, and repeats the step."""
    group = Abortable(-1 if tells_error else 0)
    discard_step(group)
    assert group.aborted != tells_error


@pytest.mark.parametrize("aborts", [True, False])
def test_routes_of_the_survivor_are_told_alone(aborts: bool, caplog: pytest.LogCaptureFixture):
    counts = torch.tensor([1.0, 2.0])
    assert _summed(counts, [Cells(0, aborts)]).tolist() == [1.0, 2.0]
    assert caplog.text.count("a rank was lost") == 1


def test_without_fault_tolerance_the_error_is_raised(tmp_path: Path):
    """Nobody would throw the step away, whose weights are then of another mean."""
    _, after = survivor(tmp_path, lambda group: group)
    assert isinstance(after, str) and after
