"""The one place where the host process reads what was computed on the device.

While a step runs, its micro-batches are added up on the device (`record`). At the start of the next step a
hook (`report`) checks that all ranks recorded alike, adds up their records and copies the sums to the host.
It warns, logs the metrics and, if the config asks for it, stops the job. The check and the copy each wait for
the device, between two steps, where the hosts have just waited for their own loss and gradient norm.

Where the arguments ask for a correction, and no hook of ours corrected in a step, the check raises on all ranks. A
process that exits logs the error for its last step, or its last rollout where the host has no step hook.

Records from before a rank died or was replaced are not added up: each rank warns of its own. The record of a step that
a host repeats is forgotten. The last step of a run is reported by `flush`, a collective that whoever ends the run calls
on every rank. Without that call, a process without other ranks reports the last step when it exits. A process with
other ranks, which may be gone by then, warns of its own micro-batches and asks nobody.

Without the hook nothing is reduced and nothing waits: each rank warns of its own micro-batches, one
micro-batch late, as soon as their copy has arrived.
"""

import atexit
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.config.view import view
from mis_plugins.correction.pipeline import Correction
from mis_plugins.errors import ConfigError, MisError, logger
from mis_plugins.hosts import megatron, tracking
from mis_plugins.hosts.rank_agreement import Uncorrected, can_add_up, outlives, raise_if_aborted
from mis_plugins.hosts.registry import current
from mis_plugins.metrics.alarms import ALARMS, EACH_TIME, ONCE, everything_rejected
from mis_plugins.metrics.partials import finalize, partials, watch
from mis_plugins.metrics.totals import Partials
from mis_plugins.packing.collectives import RANK_LOST, Arrival, to_host
from mis_plugins.packing.ragged import Ranks

if TYPE_CHECKING:
    from mis_plugins.versions.segment_wise import Written
else:
    Written = Any  # loaded where a host says which version wrote each token

# A wrong setting that scales log-probs lasts, and need not be looked for at every step. `metrics: watch` and `all`
# look at every step. `full`, to which the sums cost more, looks at the first step of every tenth rollout. The
# rollout's number decides, so that a rank that joins late agrees.
ROLLOUTS_BETWEEN = 10
ALONE = Ranks()
LAST = "no step followed; end the run with mis_plugins.mis.report_last_step(args) on each rank"
REGROUPED = "a rank joined or left since"


@dataclass(frozen=True)
class Recorded:
    """Sums over micro-batches, with the config and the ranks that they were recorded under.

    ages: the weights by age; None where the host knows no versions, or there is no weight of tokens.
    """

    config: CorrectionConfig
    ranks: Ranks
    partials: Partials
    ages: Partials | None = None

    def merge(self, other: "Recorded") -> "Recorded":
        """Merge the records of two sets of micro-batches."""
        ages = self.ages
        if ages is not None and other.ages is not None:
            ages = ages.merge(other.ages)
        return replace(self, partials=self.partials.merge(other.partials), ages=ages)

    @property
    def alone(self) -> bool:
        """Whether no other rank has anything to add."""
        return self.ranks.cp is None and self.ranks.dp is None

    def over_ranks(self) -> "Recorded":
        """Merge the records of all ranks; raises RANK_LOST where a rank died."""
        groups = [group for group in (self.ranks.cp, self.ranks.dp) if group is not None]
        added = self.each(lambda sums: sums.over_ranks(groups))
        raise_if_aborted(groups)
        return added

    def each(self, make: Callable[[Partials], Partials]) -> "Recorded":
        return replace(self, partials=make(self.partials), ages=None if self.ages is None else make(self.ages))

    @property
    def sums(self) -> dict[str, float]:
        """Sums of the partials by name, and the numbers of valid tokens whose segment-wise weight is not known.

        `nonfinite_weights` counts tokens with a log-prob that is not finite, `lacking_weights` tokens without one. The
        tensors should be on the host.
        """
        if self.ages is None or not self.config.segment_wise_on:
            return self.partials.named_sums
        row = self.ages.named_sums
        why = {"nonfinite_weights": row["nonfinite"], "lacking_weights": row["unknown"] - row["nonfinite"]}
        return self.partials.named_sums | why

    def metrics(self) -> dict[str, float]:
        """Metrics for the host's log. The tensors should be on the host."""
        by_name = finalize(self.partials, self.config) if self.config.reports_step else {}
        if self.ages is None:
            return by_name
        from mis_plugins.metrics.staleness import weight_metrics

        return by_name | weight_metrics(self.ages, self.config.segment_wise_on)


@dataclass(frozen=True)
class Ended:
    """An optimizer step that is over; `is_last` where the rollout is known to have ended with it."""

    rollout_id: int
    step_id: int
    is_last: bool = False

    def __str__(self) -> str:
        return f"rollout {self.rollout_id}, step {self.step_id}"

    def number(self, args: Any) -> int:
        """The host's number of this step; a rollout's last step tells how many steps a rollout has."""
        per_rollout = self.step_id + 1 if self.is_last else tracking.steps_per_rollout(args)
        return self.rollout_id * per_rollout + self.step_id


@dataclass(frozen=True)
class Copy:
    """Partials on their way to the host."""

    recorded: Recorded
    arrival: Arrival

    @classmethod
    def begin(cls, recorded: Recorded) -> "Copy":
        copies = recorded.each(lambda sums: sums.map(to_host))
        return cls(copies, Arrival.of_copies_from(recorded.partials.added["sums"]))

    def wait(self) -> Recorded:
        self.arrival.wait()
        return self.recorded


@dataclass
class Recorder:
    """The records of one process, and the warnings that it gave.

    step: (rollout, step) that micro-batches recorded now belong to; None until the hook has been called.
    args: the host's arguments, as the hook had them last.
    pending: the sums of the step so far, by config.
    copy: sums on their way to the host, where there is no hook.
    on_last_stage: whether this rank computes log-probs, as the hook found it; an exit may find no groups any more.
    ran: whether a hook of ours ran in the step so far, or the step is judged already.
    rollout: the rollout of the last call of `check_rollout`.
    ran_in_rollout: whether a hook of ours ran since that call.
    warned: names of warnings that are not given again.
    lock: held while `record` adds a micro-batch or a report takes the records, since threads of one process may train.
    """

    step: tuple[int, int] | None = None
    args: Any = None
    pending: dict[CorrectionConfig, Recorded] = field(default_factory=dict)
    copy: Copy | None = None
    on_last_stage: bool = True
    ran: bool = False
    rollout: int | None = None
    ran_in_rollout: bool = False
    warned: set[str] = field(default_factory=set)
    lock: Lock = field(default_factory=Lock, repr=False)

    def record(
        self,
        correction: Correction,
        pg_loss: Float[Tensor, " T"] | None = None,
        written: Written | None = None,
        numerator: Float[Tensor, " T"] | None = None,
    ) -> None:
        """Add a micro-batch; a call inside a backward, the recompute of a recorded micro-batch, adds nothing.

        Args:
            pg_loss: the loss before correction.
            written: which version wrote each token, where that is known.
            numerator: log pi_{v+1} of each token; with segment-wise weights, beside `written`.

        Raises:
            ConfigError: the config needs the step hook, and the hook was never called.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        self.ran = self.ran_in_rollout = True
        config, ranks = correction.config, correction.ragged.ranks
        if self.step is None:
            _uncorrected().check_step_hook(config)
        added = self._partials(correction, pg_loss, written)
        with self.lock:
            if added is not None:
                ages = _ages(correction, written, numerator) if self.reports_weights(config) else None
                self._add(Recorded(config, ranks, added, ages))
            if self.step is None:
                self._poll()

    def reports_weights(self, config: CorrectionConfig) -> bool:
        """Whether the weights of what is recorded now will be logged by age, where the host knows versions."""
        return self.step is not None and config.metrics != "none" and config.weighs_behavior

    def _partials(
        self, correction: Correction, pg_loss: Float[Tensor, " T"] | None, written: Written | None
    ) -> Partials | None:
        """Partials that the config asks for and the hook will report; None where no metric or warning needs any."""
        config, cp = correction.config, correction.ragged.ranks.cp
        first = cp is None or cp.rank() == 0
        if config.reports_step and self.step is not None:
            ages = None if written is None else written.known_age
            return partials(correction, pg_loss, ages, counts_sequences=first)
        asks = self.step is not None and self.step[0] % ROLLOUTS_BETWEEN == self.step[1] == 0
        relates = config.metrics == "full" and asks
        has_advantages = correction.nonfinite_advantages is not None
        watches = config.metrics != "none" or config.corrects or config.opsm or has_advantages
        return watch(correction, first, relates) if watches else None

    def report(self, args: Any, rollout_id: int, step_id: int, ranks: Ranks = ALONE) -> None:
        """Before each optimizer step, on every rank: read what the step before it recorded.

        Raises:
            MisError: `on_all_rejected: raise`, and a micro-batch of that step was all rejected; every rank
                that computes a loss raises, which only the last pipeline stage does.
            InputError: ranks recorded under different configs.
            ConfigError: the arguments ask for a correction, and no hook of ours ran in that step; every rank raises.
        """
        self._begin(args)
        ended, self.step = self.step, (rollout_id, step_id)
        if ended is not None and self.step <= ended < (rollout_id + 1, 0):
            self._taken()
            self.ran = True  # the host threw that attempt away, and repeats step or rollout
        self._report_ended(None if ended is None else Ended(*ended, is_last=ended[0] != rollout_id), ranks)

    def _begin(self, args: Any) -> None:
        """Keep what an exit needs; the first call has the exit report."""
        if self.step is None and self.rollout is None:
            atexit.register(_at_exit, weakref.ref(self))
        self.args, self.on_last_stage = args, megatron.holds_log_probs()

    def _report_ended(self, ended: Ended | None, ranks: Ranks) -> None:
        """Report the pending records, config by config in one order on every rank."""
        pending = self._taken()
        if ended is None:
            pending = {}
        ran, self.ran = self.ran, False
        apart = self._why_apart(pending, ended, ran, ranks)
        for config in sorted(pending, key=repr):
            assert ended is not None
            apart = self._report(pending[config], ranks, ended, apart)

    def check_rollout(self, args: Any, rollout_id: int, ranks: Ranks) -> None:
        """Check, where no step hook is given, that a hook of ours corrected the rollout before; raises as `report`."""
        if view(args).get("custom_megatron_before_train_step_hook_path") is not None:
            return
        self._begin(args)
        ended, self.rollout = self.rollout, rollout_id
        ran, self.ran_in_rollout = self.ran_in_rollout, False
        whole = ended is not None and ended != rollout_id  # else the host repeats the rollout
        self._why_apart({}, f"rollout {ended}" if whole else None, ran, ranks)

    def _corrected(self, ran: bool) -> bool | None:
        """Whether a hook of ours ran; None on a rank that computes no policy loss, or is asked for no correction."""
        if not self.on_last_stage:
            return None
        return ran or (None if _uncorrected().asked_for(self.args) is None else False)

    def _why_apart(
        self, pending: Mapping[CorrectionConfig, Recorded], ended: object | None, ran: bool, ranks: Ranks
    ) -> str | None:
        """Why the records of the ranks cannot be added up; None where they can.

        Args:
            ended: the step or rollout that is over; None where this rank was not there when it began.
            ran: whether a hook of ours ran in it.
        """
        corrected = None if ended is None else self._corrected(ran)
        same_ranks = all(recorded.ranks == ranks for recorded in pending.values())
        pipeline = megatron.pipeline()[0]
        try:
            agreed = can_add_up(list(pending), ended is not None, same_ranks, ranks, corrected, pipeline)
        except Uncorrected:
            raise ConfigError(_uncorrected().error_of(str(ended), self.args)) from None
        except RANK_LOST as error:
            return _why_lost(error, ranks)
        return None if agreed else REGROUPED

    def _report(self, pending: Recorded, ranks: Ranks, ended: Ended, apart: str | None) -> str | None:
        """Report what all ranks recorded, or this rank alone; return why it is alone."""
        recorded = None
        if apart is None:
            try:
                recorded = Copy.begin(pending.over_ranks()).wait()
            except RANK_LOST as error:
                apart = _why_lost(error, ranks)
        recorded = recorded or Copy.begin(pending).wait()
        config, sums = recorded.config, recorded.sums
        reports = current(self.args).reports(ranks)
        if reports or apart is not None:
            self._warn(config, sums, str(ended) if apart is None else f"{ended}, this rank")
        if reports and apart is None and (metrics := recorded.metrics()):
            tracking.log(self.args, metrics, ended.number(self.args))
        if reports and apart is not None and config.reports_step:
            logger.warning("%s: the step's metrics are not logged, which takes all ranks: %s", ended, apart)
        if config.on_all_rejected == "raise" and sums["all_rejected"]:
            where = "" if apart is None else ", on this rank"
            raise MisError(f"{everything_rejected(config, sums)}, in {ended}{where}")
        return apart

    def flush(self, args: Any, ranks: Ranks = ALONE) -> None:
        """Report the last step; on every rank, when nothing will be recorded any more."""
        if self.step is not None:
            self.args = args
            try:
                self._report_ended(Ended(*self.step), ranks)
            finally:
                self.ran = True  # neither a step that follows nor an exit judges this one again

    def at_exit(self) -> None:
        """Report the last step as far as this process can alone. Errors are logged, not raised."""
        if self.step is None:
            self._judge_at_exit(f"rollout {self.rollout}", self.ran_in_rollout)
            return
        ended = Ended(*self.step)
        self._judge_at_exit(str(ended), self.ran)
        for recorded in self._taken().values():
            try:
                self._report(recorded, recorded.ranks, ended, None if recorded.alone else LAST)
            except Exception as error:
                logger.error("the last step, reported at exit: %s", error)

    def _judge_at_exit(self, ended: str, ran: bool) -> None:
        """Log that the arguments ask for a correction, and that no hook of ours ran on this rank."""
        try:
            if self._corrected(ran) is False:
                logger.error("%s", _uncorrected().error_of(f"{ended}, this rank", self.args))
        except MisError as error:
            logger.error("%s, judged at exit: %s", ended, error)

    def _taken(self) -> dict[CorrectionConfig, Recorded]:
        """Take the records. A thread adds a micro-batch to the records before they are taken, or to the next ones."""
        with self.lock:
            taken, self.pending = self.pending, {}
        return taken

    def _add(self, recorded: Recorded) -> None:
        earlier = self.pending.get(recorded.config)
        self.pending[recorded.config] = recorded if earlier is None else earlier.merge(recorded)

    def _poll(self) -> None:
        """Where the hook is missing, read one copy that has arrived and begin one of what was recorded since."""
        if self.copy is not None and self.copy.arrival.ready:
            arrived, self.copy = self.copy.recorded, None
            self._warn(arrived.config, arrived.sums, "this rank")
        if self.copy is None and self.pending:
            self.copy = Copy.begin(self.pending.pop(next(iter(self.pending))))

    def _warn(self, config: CorrectionConfig, sums: Mapping[str, float], where: str) -> None:
        holding = {name: messages for name, alarm in ALARMS.items() if (messages := alarm(config, sums))}
        for name, messages in holding.items():
            if name not in self.warned:
                for message in messages:
                    logger.warning("%s: %s", where, message)
        self.warned = ((self.warned | set(holding)) & (set(holding) | ONCE)) - EACH_TIME


def _why_lost(error: Exception, ranks: Ranks) -> str:
    """Why this rank reports alone. Without fault tolerance the error of a collective is raised again."""
    if not outlives(ranks):
        raise error
    return f"a rank was lost ({error})"


def _uncorrected() -> Any:
    from mis_plugins.hosts import uncorrected  # loaded where a hook of ours did not run

    return uncorrected


RECORDER = Recorder()


def _at_exit(recorder: weakref.ref[Recorder]) -> None:
    """Report the last step at exit, except after an uncaught exception, which leaves a step half done."""
    alive = recorder()
    if alive is not None and not hasattr(sys, "last_value"):
        alive.at_exit()


def _ages(correction: Correction, written: Written | None, numerator: Float[Tensor, " T"] | None) -> Partials | None:
    if written is None:
        return None
    from mis_plugins.metrics.staleness import of_correction

    return of_correction(correction, written, numerator)
