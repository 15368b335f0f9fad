"""report.json: every number and text of a report, by the names of docs/metrics.md, with `kl_k3` first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mis_plugins import __version__
from mis_plugins.report.causes import CANNOT
from mis_plugins.report.own import Intent
from mis_plugins.report.proposal import Proposal
from mis_plugins.report.readers.source import Curve, Problems
from mis_plugins.report.survey import Report
from mis_plugins.report.verdict import Verdict

FORMAT = 1


@dataclass(frozen=True)
class Document:
    """Everything that the three outputs show.

    title: what was read, for people.
    complete: false where Ctrl-C ended the reading.
    own: what the run's own config did; None where no config is known.
    """

    title: str
    inputs: tuple[str, ...]
    complete: bool
    own: Intent | None
    verdict: Verdict
    report: Report | None
    proposal: Proposal | None
    curves: tuple[Curve, ...]
    problems: Problems


def as_json(document: Document) -> dict[str, Any]:
    """The document as plain values."""
    found: dict[str, Any] = {
        "format": FORMAT,
        "made_by": f"mis-plugins {__version__}",
        "title": document.title,
        "inputs": list(document.inputs),
        "complete": document.complete,
        "verdict": asdict(document.verdict),
    }
    if document.report is not None:
        found |= _of_report(document.report)
    if document.own is not None:
        found["own_config"] = asdict(document.own)
    if document.proposal is not None:
        found["proposal"] = _of_proposal(document.proposal)
    found["curves"] = [{"label": curve.label, "values": dict(curve.values)} for curve in document.curves]
    return found | {"problems": list(map(asdict, document.problems.first())), "cannot_tell": CANNOT}


def _of_report(report: Report) -> dict[str, Any]:
    return {
        "whole": report.whole,
        "opening": asdict(report.opening) if report.opening else None,
        "steps": [{"step": step, **values} for step, values in report.steps.items()],
        "logged": report.logged,
        "sequences": report.sequences,
        "changes": [{**asdict(change), "factor": change.factor} for change in report.changes],
        "causes": [
            {
                "name": one.name,
                "title": one.cause.title,
                "evidence": one.evidence,
                "fix": one.cause.fix,
                "also": list(one.also),
            }
            for one in report.findings
        ],
        "alarms": [{"step": step, "name": name, "message": text} for step, name, text in report.alarms],
        "places": report.places,
        "configs": report.outcomes,
        "worst_tokens": report.worst_tokens,
        "worst_sequences": report.worst_sequences,
    }


def _of_proposal(proposal: Proposal) -> dict[str, Any]:
    ranking = [{"name": one.candidate.name, "against": list(one.reasons)} for one in proposal.ranking]
    told = {"name": proposal.name, "trusted": proposal.trusted, "why": list(proposal.why)}
    return told | {"yaml": proposal.yaml, "flags": proposal.flags, "ranking": ranking}


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
