"""A receipt: the one file in which a session on a GPU ends, and which anybody with such a GPU may send.

    python -m lab.gpu.receipt receipt.json

draws a receipt as Markdown. Exit code 0: all demands hold; 1: a demand does not hold; 2: the file is no receipt, or the
receipt proves nothing, and the words say why.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.gpu.receipt:main", extra="dev")

import html
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lab.provenance import markdown_table, parser_of, write_json
from mis_plugins.report.readers.files import parsed
from mis_plugins.shared.budget import LINE, RecordError
from mis_plugins.shared.opened import Opened
from mis_plugins.shared.opened import read as guarded
from mis_plugins.shared.terminal import print_error, printable
from true_on_policy.verify.certificate import Link

Cell = str | int | float | None
COMMIT = re.compile(r"[0-9a-f]{12,40}")
DIFFERENCE = "first difference"
COUNTS = ("of", "comparisons")  # columns that say how many values a demand compares; `equal` stands beside them
LONGEST = 300  # characters of a text as a page shows it
# The sections in the order in which a difference is looked for: single operations before whole models, and before
# sections of a name that only a stranger's receipt has. Receipts of earlier sessions have `compiled`.
OPERATIONS_FIRST = ("attention", "kernels", "probes", "correction", "hostile", "compiled", "model", "engine")


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


@dataclass(frozen=True)
class Measured:
    """What a session ran on.

    commit: of this project.
    device: `cpu` in a dry run, in which no figure means anything.
    gpu, driver, memory: as nvidia-smi names them, or `not seen: ...`.
    cuda: the release for which torch was built; empty where there is none.
    packages: the version of each library that pins kernels.
    """

    command: str
    commit: str
    python: str
    cpu: str
    device: Literal["cuda", "cpu"]
    gpu: str
    driver: str
    memory: str
    torch: str
    cuda: str
    packages: dict[str, str]


@dataclass(frozen=True)
class Receipt:
    """A receipt says on what a session ran, under which contract, and what each section found.

    receipt: the number of this form of a receipt.
    """

    receipt: Literal[1]
    measured: Measured
    contract: dict[str, str | int]
    sections: tuple[Section, ...]

    def lacks(self) -> Iterator[str]:
        """Yield each reason for which the receipt proves nothing, whatever its sections found."""
        if self.measured.device != "cuda":
            yield f"device: {self.measured.device}, and a dry run on a CPU proves nothing of a GPU"
        elif self.measured.gpu.startswith("not seen"):
            yield f"gpu: {self.measured.gpu}"
        if not COMMIT.fullmatch(self.measured.commit):
            yield f"commit: {self.measured.commit!r} names no commit of this project without changes"

    def first_difference(self) -> str:
        """The first operation that differs though it must not, in words; empty where all demands hold."""
        place = {name: number for number, name in enumerate(OPERATIONS_FIRST)}
        ordered = sorted(self.sections, key=lambda section: place.get(section.name, len(place)))
        broken = ((section, result) for section in ordered for result in section.results if result.holds is False)
        return next((f"{section.name}: {_first(result)}" for section, result in broken), "")


def _first(result: Result) -> str:
    rows = (dict(zip(result.columns, row, strict=True)) for row in result.rows)
    differing = next((row for row in rows if row.get(DIFFERENCE)), None)
    if differing is None:
        return result.title
    named = [str(value) for name, value in differing.items() if name != DIFFERENCE][:2]
    return f"{result.title}: {', '.join(named)}: {differing[DIFFERENCE]}"


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


def write(path: Path, receipt: Receipt) -> None:
    """Write a receipt, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(receipt))


def read(path: Path) -> Receipt:
    """Read a receipt that a stranger sent.

    Raises:
        RecordError: the file is beyond a budget, is no JSON, lacks a key, has one that no receipt has, holds a value of
            another type, or contradicts itself; the message names the place.
    """
    found = guarded(path, lambda: _receipt(path))
    for section in found.sections:
        for result in section.results:
            _check(path, section, result)
    return found


def _receipt(path: Path) -> Receipt:
    from pydantic import ValidationError

    with Opened(path).file as file:
        held = parsed(file.read(int(LINE.base) + 1), path)
    try:
        return _form().validate_json(json.dumps(held), strict=True)
    except ValidationError as error:
        places = ((".".join(map(str, each["loc"])) or "the file", each["msg"]) for each in error.errors())
        raise RecordError("; ".join(f"{place}: {what}" for place, what in list(places)[:5])) from error


@cache
def _form() -> Any:
    """The form of a receipt for pydantic: no key but its own, and no NaN."""
    from pydantic import ConfigDict, TypeAdapter, with_config

    strict = with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
    for form in (Result, Section, Measured, Receipt):
        strict(form)
    return TypeAdapter(Receipt)


def _check(path: Path, section: Section, result: Result) -> None:
    """Check that a table has one width, and says that it holds where its counts say so.

    Raises:
        RecordError: it does not.
    """
    where = f"{path}: {section.name}: {result.title}"
    if any(len(row) != len(result.columns) for row in result.rows):
        raise RecordError(f"{where}: a row has other columns than {', '.join(result.columns)}")
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    of = next((name for name in COUNTS if name in result.columns and "equal" in result.columns), None)
    equal = all(not row.get(DIFFERENCE) and (of is None or row["equal"] == row[of]) for row in rows)
    if result.holds and not (rows and equal):
        raise RecordError(f"{where}: is said to hold, and its rows do not say so")


def drawn(receipt: Receipt) -> str:
    """Draw a receipt as Markdown; texts of the receipt become neither links nor HTML."""
    contract = {f"contract: {key}": value for key, value in receipt.contract.items()}
    rows = [*asdict(receipt.measured).items(), *contract.items()]
    said = [f"No proof. {shown(reason)}." for reason in receipt.lacks()]
    difference = receipt.first_difference()
    said.append(f"{held(receipt.sections)}. First operation that differs: {shown(difference or 'none')}.")
    table = markdown_table(("measured with", ""), ((shown(key), shown(_flat(value))) for key, value in rows))
    return "\n\n".join([*said, table, "\n".join(map(_section, receipt.sections))])


def _section(section: Section) -> str:
    tables = "\n".join(map(_table, section.results))
    return f"## {shown(section.name)}: {shown(section.ended)}, {section.seconds:.0f} s\n\n{tables}"


def _table(result: Result) -> str:
    verdict = {True: " All hold.", False: " **Not all hold.**", None: ""}[result.holds]
    rows = ([shown(rounded(value)) for value in row] for row in result.rows)
    table = markdown_table([*map(shown, result.columns)], rows)
    return f"**{shown(result.title)}.**{verdict} {shown(result.note)}\n\n{table}"


def rounded(value: Cell) -> Cell:
    """A number with three significant digits, which is more than a second run repeats."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return value


def _flat(value: Any) -> str:
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


def shown(text: object) -> str:
    """A stranger's text for a cell of Markdown: printable, short, and neither a link, nor code, nor HTML."""
    plain = html.escape(printable(str(text))[:LONGEST], quote=False)
    return plain.replace("|", "&#124;").replace("`", "&#96;").replace("](", "]&#40;")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, metavar="RECEIPT", help="a receipt.json")
    try:
        receipt = read(parser.parse_args().file)
    except RecordError as error:
        print_error(f"error: {error}")
        return 2
    print(drawn(receipt))
    for reason in (lacking := list(receipt.lacks())):
        print(f"no proof: {reason}", file=sys.stderr)
    return 2 if lacking else exit_code(receipt.sections)
