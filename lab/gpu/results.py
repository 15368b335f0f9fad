"""Results of a session: one table a question, written as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.provenance import as_markdown, markdown_table, write_record
from true_on_policy.verify.links import Link


@dataclass(frozen=True)
class Result:
    """A result is one table.

    Attributes:
        title: the question.
        columns, rows: the answer; numbers stay numbers.
        holds: whether everything that must be equal is equal; None where nothing is demanded (a cost, a control).
        note: what the figures say and do not say.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    holds: bool | None = None
    note: str = ""


def compared(title: str, links: Sequence[Link], demanded: bool = False, note: str = "") -> Result:
    """Make a table of links of log-probs, which must all hold where that is demanded."""
    return Result(
        title,
        ("link", "equal", "of", "furthest apart", "first difference"),
        tuple((each.name, each.equal, each.total, each.furthest, each.first or "") for each in links),
        all(each.holds for each in links) if demanded else None,
        note if demanded else "The control: nothing is demanded of it.",
    )


@dataclass(frozen=True)
class Section:
    """A section as it ended.

    Attributes:
        ended: `done`, or what kept the section from finishing; earlier results are kept.
    """

    name: str
    ended: str
    seconds: float
    results: tuple[Result, ...]


def exit_code(sections: Sequence[Section]) -> int:
    """Return 0 if all demands hold, 1 if one does not, 2 if a section is unfinished or none demands."""
    demanded = [
        result.holds for section in sections for result in section.results if result.holds is not None
    ]
    if not all(demanded):
        return 1
    return 0 if demanded and all(section.ended == "done" for section in sections) else 2


def write(path: Path, measured: dict[str, str], sections: Sequence[Section]) -> None:
    """Write the sections to `path` as JSON and to a .md beside it."""
    listed = [asdict(section) for section in sections]
    tables = "\n".join(_section(section) for section in sections)
    write_record(path, {"measured with": measured, "sections": listed}, f"{as_markdown(measured)}\n{tables}")


def _section(section: Section) -> str:
    tables = "\n".join(_table(result) for result in section.results)
    return f"## {section.name}: {section.ended}, {section.seconds:.0f} s\n\n{tables}"


def _table(result: Result) -> str:
    verdict = {True: " All hold.", False: " **Not all hold.**", None: ""}[result.holds]
    body = markdown_table(list(map(cell, result.columns)), (list(map(cell, row)) for row in result.rows))
    return f"**{result.title}.**{verdict} {result.note}\n\n{body}"


def cell(value: Any) -> str:
    """Write a value with three significant digits, which is more than a second run repeats."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")
