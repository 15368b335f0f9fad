"""`python -m mis_plugins report PATH ...`: reads what a run left, writes report.html and report.json, prints a summary.

Exit codes: 0 the mismatch was measured; 2 nothing was read that measures it, and the report says why; 3 `--watch` saw
an alarm; 130 interrupted, and what was read before is written.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.errors import InputError
from mis_plugins.report.allocator import keep_freed_memory
from mis_plugins.report.own import found_config, intent
from mis_plugins.report.proposal import propose
from mis_plugins.report.readers.paths import NOTHING, Found, check_exists, find
from mis_plugins.report.readers.source import Problems
from mis_plugins.report.readers.spelled import spell
from mis_plugins.report.summary import SHOWN_PROBLEMS, print_summary
from mis_plugins.report.survey import Survey, report, walk
from mis_plugins.report.sweep import Candidate, candidates, load
from mis_plugins.report.verdict import CALM, of_curves, verdict
from mis_plugins.report.written import Document, as_text
from mis_plugins.shared.files import finish_killed, replace_together
from mis_plugins.shared.shell import INTERRUPTED, REFUSED
from mis_plugins.shared.terminal import print_error, printable

ALARMED = 3
PAGE, NUMBERED = "report.html", re.compile(r"report-\d+\.json")
SECONDS = 2.0


def run(arguments: argparse.Namespace) -> int:
    """Make the report once, or again and again with `--watch`."""
    for path in (*arguments.paths, *arguments.against):
        check_exists(path)
    ever = False
    finish_killed(arguments.output)
    while True:
        document = read(arguments.paths, arguments)
        shown = [document, *(read([other], arguments) for other in arguments.against)]
        write(shown, arguments.output)
        print_summary(shown)
        print(f"\n{arguments.output / PAGE}", flush=True)
        ever |= all(map(_measured, shown))
        if not all(one.complete for one in shown):
            return INTERRUPTED
        if not arguments.watch:
            return 0 if ever else REFUSED
        if alarmed(document):
            return ALARMED
        try:
            time.sleep(arguments.every)
        except KeyboardInterrupt:
            return INTERRUPTED if ever else REFUSED


def _measured(document: Document) -> bool:
    """Whether a document measures the mismatch; says so on stderr where it does not."""
    if not document.verdict.measured:
        print_error(f"error: {printable(document.title)}: nothing was read that measures the mismatch")
    return document.verdict.measured


def alarmed(document: Document) -> bool:
    """Whether an alarm of docs/metrics.md fires, a cause shows, or a number lies beyond its limit."""
    beyond = document.verdict.measured and document.verdict.level != CALM
    return beyond or bool(document.report and document.report.alarms)


def suggest(arguments: argparse.Namespace) -> int:
    """Print the proposal alone: yaml, flags, why, and how much was read. What could not be read goes to stderr.

    Raises:
        InputError: no token was read that can be compared, so there is nothing to propose.
    """
    document = read(arguments.paths, arguments)
    for problem in document.problems.first(SHOWN_PROBLEMS):
        print_error(printable(f"not read: {problem}"))
    if document.report is None or document.proposal is None:
        raise InputError(
            f"{document.title}: no token with two finite log-probs was read in the loss mask, so there is nothing to "
            "propose; name a dump"
        )
    found, made = document.proposal, document.report
    extent = f"from {made.sequences} responses of {len(made.steps)} steps"
    extent += "" if document.complete else "; interrupted, so the rest was not read"
    comments = (f"{found.name}: {'; '.join(found.why)}", extent, found.flags)
    print("\n".join(f"# {printable(line)}" for line in comments), found.yaml, sep="\n")
    return 0 if document.complete else INTERRUPTED


def read(paths: Sequence[Path], arguments: argparse.Namespace) -> Document:
    """Read paths into a document."""
    keep_freed_memory()
    problems = Problems()
    found = find(paths, problems)
    own = Candidate(arguments.config, load(arguments.config)) if arguments.config else None
    own = own or found_config(found.settings, problems)
    swept = [] if arguments.sweep == "none" else candidates(arguments.sweep, own)
    survey = Survey.of(own.config if own else CorrectionConfig(), swept)
    complete = walk(survey, found.sources, problems, Told())
    made = report(survey)
    if made:
        shown = (token for one in made.worst_sequences for token in one["tokens"])
        spell(chain(made.worst_tokens, shown), found.tokenizer, problems)
    proposal = propose(swept, made.outcomes, made.whole, made.opening) if made and made.usable else None
    curves = found.read_curves(problems)
    meant = intent(own, made.whole, proposal.ranking if proposal else ()) if own and made else None
    said = verdict(made, proposal, meant) if made else of_curves(curves)
    if not said.measured:
        nothing = () if made or curves or problems.kept else paths
        for file in found.others or nothing:
            problems.add(NOTHING, file)
    title = ", ".join(path.name or str(path) for path in paths)
    inputs = _inputs(found)
    return Document(title, inputs, complete, meant, said, made, proposal, curves, problems)


def _inputs(found: Found) -> tuple[str, ...]:
    records = [f"{source.kind}: {', '.join(map(str, source.files))}" for source in found.sources]
    return (*records, *(f"{kind}: {path}" for path, kind in found.curves))


def write(documents: Sequence[Document], output: Path) -> None:
    """Write report.json and report.html of the first document, with the others beside it, as files of one run."""
    from mis_plugins.report.page import page  # it draws; the proposal alone needs no matplotlib

    names = ("report.json", *(f"report-{number}.json" for number in range(2, len(documents) + 1)))
    texts = {name: as_text(document) for name, document in zip(names, documents, strict=True)}
    earlier = {path.name for path in output.glob("report-*.json") if NUMBERED.fullmatch(path.name)}
    replace_together(output, {**texts, PAGE: page(documents)}, earlier - texts.keys())


class Told:
    """Progress on stderr, with the time left, where the work takes longer than a moment."""

    def __init__(self) -> None:
        self.begun = self.said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.said < SECONDS or not done:
            return
        self.said = now
        left = (now - self.begun) * (total - done) / done
        print(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB, {left:.0f} s left", file=sys.stderr, flush=True)
