"""The Megatron trainer on several tensor-parallel ranks of this machine, over gloo, driven from one process.

The ranks are forked from a server that has imported this module, and Megatron with it, and has computed nothing. A
process that has pinned kernels or run autograd holds threads, and its forks may hang.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float32
from megatron.core import parallel_state as mpu
from torch import Tensor

from true_on_policy.bitwise import first_mismatch
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.contract.rounding import NormOrder
from true_on_policy.engines.protocol import Sample
from true_on_policy.engines.server import on_loopback
from true_on_policy.errors import DifferenceError, TrueOnPolicyError
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.row_parallel import agreed_tree
from true_on_policy.models.tiny import read_config
from true_on_policy.trainers.megatron import Megatron
from true_on_policy.trainers.protocol import Trainer

ANSWER_SECONDS = 600


def start(checkpoint: Path, contract: Contract, order: NormOrder | None) -> Trainer:
    """Start the trainer of a proof on the contract's number of ranks; without an `order` the trainer is stock."""
    if contract.trainer_tensor_parallel > 1:
        return MegatronRanks(checkpoint, contract, order)
    return Megatron(checkpoint, contract.dtype, order, order and agreed_tree(contract))


class RankError(TrueOnPolicyError):
    """A rank raised an exception, ended or was too slow."""


class MegatronRanks:
    """The Megatron trainer on `contract.trainer_tensor_parallel` ranks; without an `order` every part is stock.

    Raises:
        RankError: a rank failed, in any method. All ranks are ended first.
        DifferenceError: two ranks computed other log-probs of one token on pinned kernels.
    """

    name = "megatron"

    def __init__(self, checkpoint: Path, contract: Contract, order: NormOrder | None = None):
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._folder = TemporaryDirectory(prefix="true-on-policy-ranks-")
        self._processes, self._connections, self._is_pinned = [], [], order is not None
        for rank in range(contract.trainer_tensor_parallel):
            ours, theirs = context.Pipe()
            rank_of = (rank, Path(self._folder.name) / "store", torch.get_num_threads())
            arguments = (theirs, *rank_of, checkpoint, contract, order)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._answers()

    def load(self, checkpoint: Path) -> None:
        self._call("load", checkpoint)

    def log_probs(self, batch: Sequence[Sample], temperatures: Sequence[float]) -> list[Float32[Tensor, "_"]]:
        first, *others = self._call("log_probs", batch, temperatures)
        for rank, other in enumerate(others if self._is_pinned else (), 1):
            if mismatch := first_mismatch(torch.cat(first), torch.cat(other)):
                raise DifferenceError(f"megatron: ranks 0 and {rank} compute other log-probs of one batch: {mismatch}")
        return first

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method on every rank, and return the answers by rank."""
        for connection in self._connections:
            with suppress(BrokenPipeError):  # _answers reports a rank that has ended
                _send(connection, (name, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[Any, Any] = {}
        try:
            while missing := [c for c in self._connections if c not in answers]:
                ready = wait(missing, ANSWER_SECONDS)
                if not ready:
                    raise RankError(f"megatron: no answer from {len(missing)} ranks in {ANSWER_SECONDS} s")
                answers |= {connection: self._receive(connection) for connection in ready}
        except BaseException:
            self.close()
            raise
        return [answers[connection] for connection in self._connections]

    def _receive(self, connection: Any) -> Any:
        rank = self._connections.index(connection)
        try:
            answer, error = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise RankError(f"megatron: rank {rank} ended without an answer") from None
        if error is not None:
            raise RankError(f"megatron, rank {rank}: {error}")
        return answer


def _send(connection: Connection, message: Any) -> None:
    """Send a message by value: torch would share a tensor's memory, which ends with the sending process."""
    connection.send_bytes(pickle.dumps(message))


def _serve(
    connection: Connection,
    rank: int,
    store: Path,
    threads: int,
    checkpoint: Path,
    contract: Contract,
    order: NormOrder | None,
) -> None:
    """Run one rank: build the trainer, and answer every call until the other end of the connection is closed."""
    # Ctrl-C reaches every process of a terminal; the process that drives the ranks ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = contract.trainer_tensor_parallel
    try:
        torch.set_num_threads(threads)
        os.environ |= on_loopback()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        mpu.initialize_model_parallel(tensor_model_parallel_size=ranks)
        probed = replace(contract, shapes=Shapes.of(read_config(checkpoint), ranks))
        with nullcontext() if order is None else pinned(probed):
            trainer = Megatron(checkpoint, contract.dtype, order, order and agreed_tree(contract))
            _send(connection, (None, None))
            while True:
                name, arguments = pickle.loads(connection.recv_bytes())
                _send(connection, (getattr(trainer, name)(*arguments), None))
    except EOFError:
        return
    except Exception:
        _send(connection, (None, traceback.format_exc()))
