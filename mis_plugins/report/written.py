"""report.json: every number and text of a report, by the names of docs/metrics.md, with `kl_k3` first."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mis_plugins import __version__
from mis_plugins.report.causes import CANNOT
from mis_plugins.report.proposal import Proposal
from mis_plugins.report.readers.files import Curve, Problems
from mis_plugins.report.survey import Report
from mis_plugins.report.verdict import Verdict

FORMAT = 2
OF_PROPOSAL = ("name", "trusted", "why", "yaml", "flags")
OF_REPORT = ("whole", "sequences", "places", "worst_tokens", "worst_sequences")


@dataclass(frozen=True)
class Document:
    """Everything that the three outputs show.

    title: what was read, for people.
    complete: false where Ctrl-C ended the reading.
    own: name of the config that the run trained with; empty where none is known.
    """

    title: str
    inputs: tuple[str, ...]
    complete: bool
    verdict: Verdict
    report: Report | None
    proposal: Proposal | None
    curves: tuple[Curve, ...]
    problems: Problems
    own: str = ""


def as_json(document: Document) -> dict[str, Any]:
    """The document as plain values."""
    return {
        "format": FORMAT,
        "made_by": f"mis-plugins {__version__}",
        "title": document.title,
        "inputs": list(document.inputs),
        "complete": document.complete,
        "verdict": asdict(document.verdict) | {"parts": document.verdict.told, "lines": document.verdict.lines},
        **(_of_report(document.report) if document.report else {}),
        **({"proposal": _of_proposal(document.proposal)} if document.proposal else {}),
        "curves": list(map(asdict, document.curves)),
        "problems": list(map(asdict, document.problems.first())),
        "cannot_tell": CANNOT,
    }


def _of_report(report: Report) -> dict[str, Any]:
    words = ("cause", "title", "fix")
    return {
        **{name: getattr(report, name) for name in OF_REPORT},
        "absent": {side: dict(names) for side, names in report.evidence.absent.items() if names},
        "steps": [{"step": step, **values} for step, values in report.steps.items()],
        "changes": [{**asdict(change), "factor": change.factor} for change in report.changes],
        "causes": [asdict(x) | {name: getattr(x.cause, name) for name in words} for x in report.findings],
        "alarms": [dict(zip(("step", "name", "message"), alarm, strict=True)) for alarm in report.alarms],
        "configs": report.outcomes,
    }


def _of_proposal(proposal: Proposal) -> dict[str, Any]:
    ranking = [{"name": judged.candidate.name, "against": judged.reasons} for judged in proposal.ranking]
    return {name: getattr(proposal, name) for name in OF_PROPOSAL} | {"ranking": ranking}


def plain(value: Any) -> Any:
    """The value without numbers that JSON lacks: NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(document: Document) -> str:
    """report.json in ASCII: a lone surrogate of a foreign name is an escape, too."""
    return json.dumps(plain(as_json(document)), indent=1, allow_nan=False) + "\n"
