"""`python -m mis_plugins report PATH ...`: reads what a run left, writes report.html and report.json, prints a summary.

Exit codes: 0 the mismatch was measured; 2 nothing was read that measures it, and the report says why; 3 `--watch` saw
an alarm; 130 interrupted, and what was read before is written.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import InputError
from mis_plugins.explain.limits import FIRST, LIMITS
from mis_plugins.report.beside import found_config, spell, tokenizer_of
from mis_plugins.report.causes import FEW
from mis_plugins.report.proposal import Proposal, propose
from mis_plugins.report.readers.files import Problems
from mis_plugins.report.readers.paths import NOTHING, find, tell_nothing
from mis_plugins.report.survey import Survey, Told, keep_freed_memory, report, walk
from mis_plugins.report.sweep import Candidate, candidates, load
from mis_plugins.report.verdict import ALARM, CALM, level_of, of_curves, verdict
from mis_plugins.report.written import Document, as_text
from mis_plugins.shared.files import finish_killed, replace_together
from mis_plugins.shared.shell import INTERRUPTED, REFUSED, importing
from mis_plugins.shared.terminal import SECONDS, print_error, print_table, printable, tell

ALARMED = 3
NEEDED = "give behavior_log_probs and proximal_log_probs of tokens, or curves of kl_k3 and its like"
PAGE = "report.html"
WAIT, LONGEST_WAIT = 60.0, 86_400  # seconds
SHOWN_PROBLEMS, SHOWN_CONFIGS, SHOWN_PATHS = 10, 8, 4
SHOWN = (FIRST, "kl_k1", "log_prob_diff_abs_mean", "ratio_mean", "ess_ratio", "prob_correlation", "kept_fraction")


def run(arguments: argparse.Namespace) -> int:
    """Make the report once, or again and again with `--watch`; raises InputError where an argument is wrong."""
    ever = False
    wait = WAIT if arguments.every is None else arguments.every
    if not 0 <= wait <= LONGEST_WAIT:
        raise InputError(f"--every: got {wait:g}; give seconds from 0 to {LONGEST_WAIT}")
    if arguments.every is not None and not arguments.watch:
        raise InputError(f"--every: got {wait:g}, and without --watch there is one look; add --watch, or drop --every")
    if arguments.output.is_file():
        raise InputError(f"--output {arguments.output}: is a file; name a folder")
    finish_killed(arguments.output)
    while True:
        document = read(arguments.paths, arguments)
        write(document, arguments.output)
        print_summary(document)
        print(f"\n{arguments.output / PAGE}", flush=True)
        ever |= document.verdict.measured
        if not document.verdict.measured:
            title = printable(document.title)
            print_error(f"error: {title}: nothing was read that measures the mismatch; {NEEDED}")
        if not document.complete:
            return INTERRUPTED
        if not arguments.watch:
            return 0 if ever else REFUSED
        if alarmed(document):
            return ALARMED
        try:
            time.sleep(wait)
        except KeyboardInterrupt:
            return INTERRUPTED if ever else REFUSED


def alarmed(document: Document) -> bool:
    """Whether an alarm of docs/metrics.md fires, a cause shows, or a number leaves its limit, rises or ends early.

    A file that breaks off may be one that the run still writes.
    """
    made = document.report
    beside = of_curves(document.curves, least=LIMITS[FIRST].high if made else 0.0)
    if beside.measured and beside.level != CALM:
        return True
    if made is None or not document.verdict.measured:
        return bool(made and made.alarms)
    level = level_of(replace(made, torn=()))
    few = made.usable < FEW and level != ALARM
    return bool(made.alarms) or (level != CALM and not few)


def suggest(arguments: argparse.Namespace) -> int:
    """Print the proposal alone: yaml, flags, why, and how much was read. What could not be read goes to stderr."""
    document = read(arguments.paths, arguments)
    for problem in document.problems.first(SHOWN_PROBLEMS):
        print_error(printable(f"not read: {problem}"))
    if document.report is None or document.proposal is None:
        raise InputError(
            f"{document.title}: no token with two finite log-probs was read in the loss mask, so there is nothing to "
            "propose; name a dump"
        )
    proposal, made = document.proposal, document.report
    extent = f"from {made.sequences} responses of {len(made.steps)} steps"
    lost = document.problems.of_file.total()
    extent += f"; not read at {lost} place{'s' * (lost > 1)}" * bool(lost)
    extent += "" if document.complete else "; interrupted, so the rest was not read"
    together = filter(None, [document.verdict.parts.get("Read as one run")])
    comments = (f"{proposal.name}: {'; '.join(proposal.why)}", extent, *together, proposal.flags)
    print("\n".join(f"# {printable(line)}" for line in comments), proposal.yaml, sep="\n")
    return 0 if document.complete else INTERRUPTED


def read(paths: Sequence[Path], arguments: argparse.Namespace) -> Document:
    """Read paths into a document."""
    keep_freed_memory()
    problems = Problems()
    scan = find(paths, problems)
    own = None if arguments.config is None else Candidate(arguments.config, load(arguments.config))
    own = own or found_config(scan.files, problems)
    swept = [] if arguments.sweep == "none" else candidates(arguments.sweep, own)
    survey = Survey.of(own.config if own else CorrectionConfig(), swept)
    complete = walk(survey, scan.sources, problems, progress())
    made = report(survey)
    if made:
        shown = (token for sequence in made.worst_sequences for token in sequence["tokens"])
        spell(chain(made.worst_tokens, shown), tokenizer_of(paths), problems)
    proposal = None
    if made and made.usable:
        length = made.usable / max(made.sequences, 1)
        calm = level_of(replace(made, rejected=0, torn=())) == CALM
        proposal = propose(swept, made.outcomes, made.whole, made.steps, length, calm)
    before = problems.of_file.total()
    curves = scan.read_curves(problems)
    unread = problems.of_file.total() - before
    if not (made or curves):
        for file in scan.others:
            tell_nothing(file, problems)
        for path in () if problems.kept else paths:
            problems.add(NOTHING, path)
    judgement = verdict(made, proposal, curves) if made else of_curves(curves, survey.rejected, unread, problems)
    title = ", ".join(path.name or str(path) for path in paths[:SHOWN_PATHS])
    title += f" and {len(paths) - SHOWN_PATHS} more" if paths[SHOWN_PATHS:] else ""
    inputs = (
        *([f"the run's config: {own.name}"] if own else []),
        *(f"{source.kind}: {', '.join(map(str, source.files))}" for source in scan.sources),
        *(f"{kind}: {path}" for path, kind in scan.curves),
    )
    named = own.name if own else ""
    return Document(title, inputs, complete, judgement, made, proposal, curves, problems, named)


def write(document: Document, output: Path) -> None:
    """Write report.json and report.html, as files of one run."""
    with importing():  # matplotlib, which the proposal alone does not need
        from mis_plugins.report.page import page

    replace_together(output, {"report.json": as_text(document), PAGE: page(document)})


def progress() -> Told:
    """A function that tells on stderr how far the work is, and the time left, where it takes longer than a moment."""
    begun = last = time.monotonic()

    def tell_bytes(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last >= SECONDS:
            last = now
            left = (now - begun) * (total - done) / done
            tell(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB, {left:.0f} s left")

    return tell_bytes


# The terminal's summary: verdict, causes, numbers, proposal; by rich where stdout is a terminal.


def print_summary(document: Document) -> None:
    """Print a document."""
    for line in _lines(document):
        print(printable(line))
    if lost := document.problems.first(SHOWN_PROBLEMS):
        print()
        print_table(["not read", "place", "reason"], [(x.file, x.place, x.reason) for x in lost])
    if document.report is not None:
        whole = document.report.whole
        print()
        print_table(["", document.title], [(name, f"{whole[name]:.4g}" if name in whole else "-") for name in SHOWN])
    if document.proposal is not None:
        print()
        columns = ["config", "kept", "ess", "mean weight", "cosine", "judged"]
        print_table(columns, list(_outcomes(document.proposal)))


def _lines(document: Document) -> Iterator[str]:
    mark = "ALARM" if document.verdict.level == ALARM else document.verdict.level
    yield f"{document.title}: {mark}. {document.verdict.headline}"
    yield from (f"  {line}" for line in document.verdict.lines)
    for finding in document.report.findings if document.report else ():
        yield f"  Cause: {finding.cause.title}. {finding.evidence}"
        yield f"    Against it: {finding.against}"
        yield f"    Fix: {finding.cause.fix}"
    if not document.complete:
        yield "  Interrupted: the numbers are those of what was read before."


def _outcomes(proposal: Proposal) -> Iterator[list[str]]:
    for judged in proposal.ranking[:SHOWN_CONFIGS]:
        n, cosine = judged.numbers, "-" if judged.cosine is None else f"{judged.cosine:.3f}"
        shares = f"{n['kept_fraction']:.1%}", f"{n['ess']:.1%}"
        against = "; ".join(judged.reasons) or "in"
        yield [judged.candidate.name, *shares, f"{n['applied_mean']:.3f}", cosine, against]
