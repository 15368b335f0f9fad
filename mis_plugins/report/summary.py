"""The terminal's summary: verdict, causes, numbers, proposal; by rich where stdout is a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mis_plugins.report.numbers import FIRST
from mis_plugins.report.proposal import Proposal
from mis_plugins.report.verdict import ALARM, CALM
from mis_plugins.report.written import Document
from mis_plugins.shared.table import print_table
from mis_plugins.shared.terminal import printable

SHOWN = (
    FIRST,
    "kl_k1",
    "log_prob_diff_abs_mean",
    "ratio_mean",
    "ess_ratio",
    "prob_correlation",
    "kept_fraction",
)
SHOWN_PROBLEMS = 10
MARK = {CALM: "calm", ALARM: "ALARM"}


def print_summary(documents: Sequence[Document]) -> None:
    """Print one document, or several side by side."""
    for document in documents:
        for line in _lines(document):
            print(printable(line))
    lost = [problem for document in documents for problem in document.problems.first(SHOWN_PROBLEMS)]
    if lost:
        print()
        print_table(["not read", "place", "reason"], [(one.file, one.place, one.reason) for one in lost])
    columns = [document for document in documents if document.report is not None]
    if columns:
        rows = [[name, *(_number(one, name) for one in columns)] for name in SHOWN]
        print()
        print_table(["", *(one.title for one in columns)], rows)
    if len(columns) == 1 and columns[0].proposal is not None:
        _print_outcomes(columns[0].proposal)


def _lines(document: Document) -> Iterator[str]:
    yield f"{document.title}: {MARK.get(document.verdict.level, 'watch')}. {document.verdict.headline}"
    yield from (f"  {line}" for line in document.verdict.lines)
    if document.report is not None:
        for one in document.report.findings:
            yield f"  Cause: {one.cause.title}. {one.evidence}"
            yield f"    Fix: {one.cause.fix}"
    if not document.complete:
        yield "  Interrupted: the numbers are those of what was read before."


def _number(document: Document, name: str) -> str:
    value = document.report.whole.get(name) if document.report else None
    return "-" if value is None else f"{value:.4g}"


def _print_outcomes(proposal: Proposal) -> None:
    rows = []
    for one in proposal.ranking[:8]:
        n = one.numbers
        shown = [
            one.candidate.name,
            f"{n['kept_fraction']:.1%}",
            f"{n['ess']:.1%}",
            f"{n['applied_mean']:.3f}",
        ]
        rows.append(
            [*shown, "-" if one.cosine is None else f"{one.cosine:.3f}", "; ".join(one.reasons) or "in"]
        )
    print()
    print_table(["config", "kept", "ess", "mean weight", "cosine", "judged"], rows)
