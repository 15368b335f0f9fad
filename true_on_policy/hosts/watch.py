"""Watch while a run trains whether the trainer's log-probs equal the engine's bit by bit.

Every micro-batch is compared on the device. Its flags are copied without blocking, and the micro-batch is kept until
the before-train-step hook of the next step reads the flags. Where a log-prob differs, the watch counts distances in
ulps and writes the first sample to disk.

The flags of the last step are read when the process exits: a difference is logged and written, and stops nothing. Then
the totals of the run are logged.

Without the step hook (Miles calls none on FSDP), flags are read at a later micro-batch, once they have arrived. A rank
that saw a difference then stops alone under `on_difference: raise`.
"""

import atexit
import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mis_plugins.packing.collectives import Arrival, to_host
from mis_plugins.packing.ragged import to_device
from mis_plugins.shared.budget import RecordError
from mis_plugins.shared.opened import optional
from true_on_policy.bitwise import Mismatch, first_mismatch
from true_on_policy.diff.log_prob_record import absent
from true_on_policy.errors import DifferenceError
from true_on_policy.hosts.config import BitwiseConfig
from true_on_policy.hosts.micro_batch import MicroBatch, write_sample

logger = logging.getLogger("true_on_policy")

Step = tuple[int, int]  # rollout, step


@dataclass
class Totals:
    """The totals of compared and of different tokens.

    ulps: how many tokens differ by each distance, by `bitwise.LABELS`.
    without: how many sequences lack the log-probs of one side.
    """

    compared: int = 0
    different: int = 0
    ulps: Counter[str] = field(default_factory=Counter)
    without: int = 0

    def add(self, compared: int, different: int) -> None:
        self.compared += compared
        self.different += different

    def __str__(self) -> str:
        ulps = f"; ulps: {', '.join(f'{k}: {n}' for k, n in self.ulps.items())}" if self.ulps else ""
        lacking = f"; sequences without the log-probs of one side: {self.without}" if self.without else ""
        return f"{self.different} of {self.compared} log-probs differ{ulps}{lacking}"


@dataclass(frozen=True)
class Difference:
    """A difference is the first token of a micro-batch that differs, with the counts of the micro-batch.

    number: the number of the micro-batch among the micro-batches that are read together.
    mismatch: the mismatch of the valid tokens; its coordinate counts valid tokens alone.
    sequence: the number of the sequence in `batch`, which holds only compared sequences.
    position: of the token in its response.
    """

    number: int
    batch: MicroBatch
    mismatch: Mismatch
    sequence: int
    position: int

    @classmethod
    def of(cls, number: int, batch: MicroBatch) -> "Difference":
        engine, trainer, valid = batch.on_host()
        mismatch = first_mismatch(engine[valid], trainer[valid], missing=absent(engine[valid]))
        assert mismatch is not None, "the device saw a difference that the host does not"
        index = valid.nonzero().flatten()[mismatch.coordinate[0]]
        return cls(number, batch, mismatch, *batch.locate(int(index)))

    def __str__(self) -> str:
        engine, trainer = self.mismatch.sides
        return f"engine {engine}, trainer {trainer}, {self.mismatch.apart}"

    @property
    def place(self) -> str:
        sequence = self.batch.numbers[self.sequence]
        return f"micro-batch {self.number}, sequence {sequence}, response token {self.position}"


@dataclass
class Comparison:
    """The comparison that watches one process of the trainer.

    step: the step of the micro-batches compared now; None until the step hook has been called.
    pending: the micro-batches whose flags have not been read.
    totals: the totals of all flags that were read.
    written: the folder of the only sample that this rank writes; None until then.
    is_told: whether the log has already said that all log-probs are equal.
    latest: the host's arguments and the config of the latest call of `record`.
    """

    step: Step | None = None
    pending: list[MicroBatch] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    written: Path | None = None
    is_told: bool = False
    latest: tuple[Any, BitwiseConfig] | None = None

    def record(self, batch: MicroBatch, args: Any, config: BitwiseConfig) -> None:
        """Keep a micro-batch until its flags are read.

        Raises:
            DifferenceError: an earlier micro-batch differed, with `on_difference: raise` and without the step hook.
        """
        optional("safetensors.torch")  # a lack shows at the first micro-batch, not at the first difference
        self._begin()
        self.latest = args, config
        if self.step is None:
            arrived = list(takewhile(lambda earlier: earlier.arrival.ready, self.pending))
            del self.pending[: len(arrived)]
            self._stop(config, self._read(arrived, args, config, None), None)
        self.pending.append(batch)

    def _begin(self) -> None:
        """Have an exit tell the totals, once."""
        if self.latest is None and not self.totals.without:
            atexit.register(_at_exit, weakref.ref(self))

    def leave_out(self, sequences: int) -> None:
        """Count sequences that lack the log-probs of one side, and log the first micro-batch with some."""
        if not sequences:
            return
        self._begin()
        if not self.totals.without:
            logger.warning(
                "%s: %d sequences without rollout_log_probs or log_probs are counted and not compared. The "
                "engine must return log-probs, and the trainer recompute them (not with --use-rollout-logprobs alone)",
                _where(self.step),
                sequences,
            )
        self.totals.without += sequences

    def report(self, args: Any, config: BitwiseConfig, step: Step) -> None:
        """Read the flags of the previous step; every rank calls this before each optimizer step.

        Raises:
            DifferenceError: a rank found a difference, with `on_difference: raise`; every rank raises.
        """
        ended, self.step = self.step, step
        pending, self.pending = self.pending, []
        differs = self._read(pending, args, config, ended)
        if config.on_difference == "raise":
            self._stop(config, _anywhere(differs), ended)

    def at_exit(self) -> None:
        """Read the pending flags when the process exits, and log the totals; an exception is logged and not raised."""
        pending, self.pending = self.pending, []
        if self.latest is None and not self.totals.without:
            return
        try:
            if self.latest is not None:
                self._read(pending, *self.latest, self.step)
            doubtful = self.totals.different or self.totals.without or not self.totals.compared
            level = logging.WARNING if doubtful else logging.INFO
            logger.log(level, "%s, the whole run: %s", _where(None), self.totals)
        except Exception as error:
            logger.error("the last step, compared at exit: %s", error)

    def _read(self, batches: Sequence[MicroBatch], args: Any, config: BitwiseConfig, step: Step | None) -> bool:
        """Read the flags of micro-batches, log and write the differences, and return whether there is one."""
        totals, differing = Totals(), []
        for number, batch in enumerate(batches):
            compared, different = batch.read()
            totals.add(compared, different)
            if different:
                difference = Difference.of(number, batch)
                totals.ulps.update(difference.mismatch.histogram)
                differing.append(difference)
        self._tell(totals, args, step)
        if differing:
            self._show(differing[0], args, config, step)
        self.totals.add(totals.compared, totals.different)
        self.totals.ulps.update(totals.ulps)
        return bool(differing)

    def _tell(self, totals: Totals, args: Any, step: Step | None) -> None:
        """Log differences each time, and once that all log-probs are equal."""
        if totals.different:
            logger.warning("%s: %s (%s)", _where(step), totals, described(args))
        elif totals.compared and not self.is_told:
            self.is_told, equal = True, "%s: %d log-probs, all bitwise equal (%s)"
            logger.info(equal, _where(step), totals.compared, described(args))

    def _show(self, first: Difference, args: Any, config: BitwiseConfig, step: Step | None) -> None:
        logger.warning("%s: first in %s: %s", _where(step), first.place, first)
        if self.written is not None:
            return
        named = "" if step is None else f"rollout-{step[0]}-step-{step[1]}-"
        folder = config.place(args) / f"{named}rank-{own_rank()}"
        metadata = {"where": f"{_where(step)}, {first.place}", "compared": described(args)}
        try:
            files = write_sample(first.batch, first.sequence, folder, metadata)
        except (OSError, RecordError) as error:
            # A sample that cannot be written must not stop this rank alone: other ranks would wait.
            logger.error("the sample was not written: %s; make room, or name another bitwise.folder", error)
            return
        self.written = folder
        logger.warning("written; compare with: python -m true_on_policy diff %s %s", *files)

    def _stop(self, config: BitwiseConfig, differs: bool, step: Step | None) -> None:
        if differs and config.on_difference == "raise":
            where = f"in {self.written}" if self.written else "told of in the log of the rank that saw it"
            raise DifferenceError(
                f"{_where(step)}: rollout and trainer log-probs were to be bitwise equal and are not "
                f"(bitwise.on_difference: raise); the first sample is {where}"
            )


def _at_exit(comparison: weakref.ref[Comparison]) -> None:
    kept = comparison()
    if kept is not None:
        kept.at_exit()


def described(args: Any) -> str:
    """Describe which log-probs are compared, and after which cast; an aborted sample keeps decode's log-probs."""
    rescored = getattr(args, "recompute_logprobs_via_prefill", False)
    source = "prefill re-score (aborted samples: decode)" if rescored else "decode"
    mode = getattr(args, "true_on_policy_mode", False)
    half = [name for name in ("bf16", "fp16") if getattr(args, name, False)] if mode else []
    cast = f"cast from float32 to {half[0]} by --true-on-policy-mode" if half else "as float32"
    return f"the engine's log-probs of {source}, {cast}, with those the trainer recomputed before training"


def _where(step: Step | None) -> str:
    rank = f"rank {own_rank()}"
    return rank if step is None else f"rollout {step[0]}, step {step[1]}, {rank}"


def own_rank() -> int:
    """The rank of this process in the default group; 0 where there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def _anywhere(differs: bool) -> bool:
    """Whether any rank found a difference; every rank must ask, pipeline stages without log-probs too."""
    if not dist.is_initialized():
        return differs
    on_gpu = torch.cuda.is_available() and dist.get_backend() != "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    flag = to_device([int(differs)], device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    copy = to_host(flag)
    Arrival.of_copies_from(flag).wait()
    return bool(copy.tolist()[0])


COMPARISON = Comparison()
