"""Results of a session: one table a question, and how they are drawn as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.provenance import markdown_table
from true_on_policy.verify.certificate import Link

Cell = str | int | float | None


@dataclass(frozen=True)
class Result:
    """A result is one table.

    title: the question.
    columns, rows: the answer; numbers stay numbers.
    holds: whether everything that must be equal is equal; None where nothing is demanded (a cost, a control).
    note: what the figures say and do not say.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
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

    ended: `done`, or what kept the section from finishing; earlier results are kept.
    """

    name: str
    ended: str
    seconds: float
    results: tuple[Result, ...]


def exit_code(sections: Sequence[Section]) -> int:
    """Return 0 if all demands hold, 1 if one does not, 2 if a section is unfinished or none demands."""
    demanded = [result.holds for section in sections for result in section.results if result.holds is not None]
    if not all(demanded):
        return 1
    return 0 if demanded and all(section.ended == "done" for section in sections) else 2


def held(sections: Sequence[Section]) -> str:
    """How many demands hold, and which sections did not finish, in words."""
    asked = [result.holds for section in sections for result in section.results if result.holds is not None]
    unfinished = [f"{section.name} ({section.ended})" for section in sections if section.ended != "done"]
    words = f"{sum(asked)} of {len(asked)} demands hold" if asked else "nothing was demanded"
    return f"{words}; not finished: {', '.join(unfinished)}" if unfinished else words


def tables(sections: Sequence[Section], shown: Callable[[object], str]) -> str:
    """Draw each section as Markdown; `shown` writes every text of a result."""
    return "\n".join(_section(section, shown) for section in sections)


def _section(section: Section, shown: Callable[[object], str]) -> str:
    drawn = "\n".join(_table(result, shown) for result in section.results)
    return f"## {shown(section.name)}: {shown(section.ended)}, {section.seconds:.0f} s\n\n{drawn}"


def _table(result: Result, shown: Callable[[object], str]) -> str:
    verdict = {True: " All hold.", False: " **Not all hold.**", None: ""}[result.holds]
    rows = ([shown(rounded(value)) for value in row] for row in result.rows)
    table = markdown_table([shown(name) for name in result.columns], rows)
    return f"**{shown(result.title)}.**{verdict} {shown(result.note)}\n\n{table}"


def rounded(value: Cell) -> Cell:
    """A number with three significant digits, which is more than a second run repeats."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return value
