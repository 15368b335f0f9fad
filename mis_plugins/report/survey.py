"""One pass over the records: every collector sees each batch once, and memory holds sums and the worst cases.

The step metrics are those of the training path: `correct` makes weights and masks, `partials` their sums, and
`finalize` the numbers. A dump of one optimizer step therefore gives the numbers that `metrics: all` logged for it.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import Correction, correct
from mis_plugins.explain.limits import FIRST
from mis_plugins.metrics.alarms import ALARMS
from mis_plugins.metrics.partials import finalize, partials
from mis_plugins.metrics.tokens import Tokens
from mis_plugins.metrics.totals import Partials
from mis_plugins.report.causes import FEW, Facts, Finding, Table, findings
from mis_plugins.report.changes import Change, changes, joined_steps
from mis_plugins.report.evidence import Evidence
from mis_plugins.report.places import Tables, Worst
from mis_plugins.report.readers.files import Problems, Source
from mis_plugins.report.record import Batch, Record, batches
from mis_plugins.report.sweep import Candidate, Outcome, Shared, with_own_mean
from mis_plugins.shared.budget import CHANGES, STEPS

Told = Callable[[int, int], None]  # called with bytes done and bytes in all
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT, LARGEST = 2**28, 2**25  # bytes at the end of the heap; largest piece that is taken from there


@dataclass
class StepNumbers:
    """Partials of every step. Steps beyond the last `OPEN` are kept sparse: a tenth of 0.1 MB each."""

    OPEN = 8
    config: CorrectionConfig
    steps: dict[int, Partials] = field(default_factory=dict)

    def add(self, batch: Batch, correction: Correction) -> None:
        """Add a batch; `correction` is of this config."""
        added = partials(correction, ages=batch.whole_numbers("ages"))
        earlier = self.steps.pop(batch.step, None)
        self.steps[batch.step] = added if earlier is None else _dense(earlier).merge(added)
        if len(self.steps) > self.OPEN:
            last = list(self.steps)[-1 - self.OPEN]
            self.steps[last] = self.steps[last].map(lambda x: x.to_sparse() if x.dim() == 2 and not x.is_sparse else x)

    def metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Metrics of each step, in order."""
        for step in sorted(self.steps):
            yield step, ordered(finalize(_dense(self.steps[step]), self.config))

    def whole(self) -> Partials:
        """Partials of the whole run."""
        return reduce(Partials.merge, map(_dense, self.steps.values()))

    def alarms(self) -> Iterator[tuple[int, str, str]]:
        """Step, name and message of every alarm of docs/metrics.md that fires."""
        for step in sorted(self.steps):
            sums = self.steps[step].named_sums
            for name, alarm in ALARMS.items():
                yield from ((step, name, message) for message in alarm(self.config, sums))


def _dense(part: Partials) -> Partials:
    return part.map(lambda x: x.to_dense() if x.is_sparse else x)


def ordered(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics with `kl_k3` first."""
    return ({FIRST: values[FIRST]} if FIRST in values else {}) | dict(values)


@dataclass
class Survey:
    """All collectors of one pass.

    own: the run's config; the numbers of the steps are what the training path logged with it.
    rejected: number of records that could not be read.
    torn: files that could not be read to their end, or hold no token.
    together: files and folders that hold the same steps, and are read as one run.
    """

    own: CorrectionConfig
    numbers: StepNumbers
    outcomes: tuple[Outcome, ...]
    tables: Tables = field(default_factory=Tables)
    worst: Worst = field(default_factory=Worst)
    evidence: Evidence = field(default_factory=Evidence)
    sequences: int = 0
    rejected: int = 0
    torn: tuple[str, ...] = ()
    together: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(cls, own: CorrectionConfig, candidates: Sequence[Candidate]) -> "Survey":
        asked = replace(own, metrics="all", segment_wise=None, opsm=None, objective=None)
        return cls(asked, StepNumbers(asked), tuple(map(Outcome, candidates)))

    def add(self, batch: Batch) -> None:
        """Let every collector see a batch."""
        correction = correct(batch.proximal, batch.behavior, batch.ragged, with_own_mean(self.own))
        tokens = Tokens.of(correction)
        self.numbers.add(batch, correction)
        for collector in (self.evidence, self.tables, self.worst):
            collector.add(batch, tokens)
        if self.outcomes:
            shared = Shared.of(batch, correction.stage.ratio)
            for outcome in self.outcomes:
                outcome.add(shared)
        self.sequences += len(batch.records)

    def add_all(self, records: Iterable[Record], tell: Callable[[], None] = lambda: None) -> None:
        """Add all records; `tell` is called after each batch."""
        for batch in batches(records):
            if batch.ragged.loss_mask.numel():
                self.add(batch)
                tell()


@dataclass(frozen=True)
class Report:
    """What a report shows, in plain numbers and texts.

    steps: metrics of each step, by the names of docs/metrics.md.
    whole: the metrics over all steps together.
    rejected, torn, together: as in `Survey`.
    usable: number of tokens that the loss mask keeps and whose two log-probs are finite; all means are over them.
    evidence: sums beside the metrics.
    spread: as in `Facts`.
    empty: number of responses without a usable token.
    """

    steps: dict[int, dict[str, float]]
    whole: dict[str, float]
    places: Mapping[str, Table]
    changes: Sequence[Change]
    findings: list[Finding]
    alarms: list[tuple[int, str, str]]
    worst_tokens: list[Any]
    worst_sequences: list[dict[str, Any]]
    outcomes: dict[str, dict[str, Any]]
    sequences: int
    rejected: int
    torn: tuple[str, ...]
    together: tuple[str, ...]
    usable: int
    evidence: Evidence
    spread: dict[str, float]
    empty: int


def walk(survey: Survey, sources: Sequence[Source], problems: Problems, tell: Told) -> bool:
    """Read every source; return false where Ctrl-C ended the walk, so that what is done can be written."""
    total, done, steps = sum(source.size for source in sources), 0, dict[int, str]()
    try:
        for source in sources:
            tell(done, total)
            problems.bytes_read, seen, lost = 0, survey.sequences, problems.of_file.total()
            torn = len(problems.torn)
            survey.together |= dict.fromkeys(map(str, source.twice))
            records = _of_few_steps(source.records(problems), steps, source, survey.together)
            survey.add_all(
                problems.each(records, source.name, source.size),
                lambda done=done: tell(done + problems.bytes_read, total),
            )
            if (seen, lost) == (survey.sequences, problems.of_file.total()):
                problems.add("holds no token", source.name, torn=True)
            survey.rejected += problems.of_file.total() - lost - (len(problems.torn) - torn)
            survey.torn = tuple(problems.torn)
            done += source.size
    except KeyboardInterrupt:
        return False
    tell(total, total)
    return True


def _of_few_steps(
    records: Iterable[Record], steps: dict[int, str], source: Source, together: dict[str, None]
) -> Iterator[Record]:
    """Records of a source, until they are beyond a budget; `steps` has the first source of every step so far."""
    size, last, changes = source.size, None, 0
    for record in records:
        if record.step != last:
            again = last is not None and record.step < last and record.step in steps
            first = steps.setdefault(record.step, source.name)
            together |= {first: None, source.name: None} if first != source.name or again else {}
            last, changes = record.step, changes + 1
            CHANGES.check(changes, size, source.name)
            STEPS.check(len(steps), size, source.name)
        yield record


def report(survey: Survey) -> Report | None:
    """The report of everything that a survey has seen; None where it saw no token."""
    if not survey.numbers.steps:
        return None
    whole = survey.numbers.whole()
    steps = dict(survey.numbers.metrics())
    finite = {step: x for step, values in steps.items() if math.isfinite(x := values.get(FIRST, math.nan))}
    joined = joined_steps(finite, {step: steps[step]["tokens"] for step in finite}, FEW)
    facts = Facts(whole.named_sums, survey.evidence, survey.tables, changes(list(joined), list(joined.values())))
    return Report(
        steps=steps,
        whole=ordered(finalize(whole, survey.own)),
        places=facts.places,
        changes=facts.changes,
        findings=findings(facts),
        alarms=list(survey.numbers.alarms()),
        worst_tokens=[token for _, token in survey.worst.tokens.held],
        worst_sequences=survey.worst.worst_sequences(),
        outcomes={outcome.candidate.name: outcome.numbers() for outcome in survey.outcomes if outcome.sums},
        sequences=survey.sequences,
        rejected=survey.rejected,
        torn=survey.torn,
        together=tuple(survey.together),
        usable=int(whole.named_sums["usable"]),
        evidence=survey.evidence,
        spread=facts.spread,
        empty=int((facts.rows[1] == 0).sum()),
    )


def keep_freed_memory() -> None:
    """Have glibc keep up to `KEPT` freed bytes: new pages cost as much time as a batch's numbers."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return
    mallopt(MMAP_THRESHOLD, LARGEST)
    mallopt(TRIM_THRESHOLD, KEPT)
