"""Parts of `docs/report.md`: tables of limits and budgets, and every cause with its fix.

python -m lab.pages.report
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.pages.report:main")

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from lab.pages.parts import write
from lab.provenance import markdown_table
from mis_plugins.explain.limits import LIMITS, Limits
from mis_plugins.explain.rungs import record
from mis_plugins.report.causes import CANNOT, CAUSES
from mis_plugins.report.places import PLACES
from mis_plugins.shared.budget import BUDGETS, MEGABYTE

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Write the page."""
    return write("report.md", part, __doc__)


def part(name: str) -> str:
    """A part of the page."""
    return "\n".join(PARTS[name]()).strip("\n")


def _measured() -> Iterator[str]:
    """The summary of the record of planted and clean runs."""
    held = json.loads((RESULTS / "report_causes.json").read_text(encoding="utf-8"))
    yield f"`lab/results/report_causes.md` (`python -m lab.report_causes`): {held['summary']}"


def _costs() -> Iterator[str]:
    """The budgets of reading."""
    yield "| what | any file may ask for | and for each MB of it | else |\n|---|---|---|---|"
    for one in BUDGETS:
        more = f"{one.per_byte * MEGABYTE:,.0f}" if one.per_byte else "none"
        yield f"| {one.what} | {one.base:,.0f} | {more} | {one.why} |"


def _places() -> Iterator[str]:
    yield markdown_table(("table", "buckets"), ((name, place.what) for name, place in PLACES.items()))


def _limits() -> Iterator[str]:
    yield markdown_table(("number", "limit"), ((f"`{name}`", _limit(limits)) for name, limits in LIMITS.items()))


def _ladder() -> Iterator[str]:
    """The rungs of the real model."""
    rows = ((rung.words, rung.prompts, rung.tokens, f"{rung.k3:.2g}", f"{rung.p99:.2g}") for rung in record().steps)
    yield markdown_table(("engine", "prompts", "tokens", "kl_k3", "p99 of abs log r"), rows)


def _limit(limits: Limits) -> str:
    words = (f"below {limits.low:g}", f"above {limits.high:g}")
    alarm = "" if math.isinf(limits.alarm) else f"; an alarm above {limits.alarm:g}"
    return " or ".join(one for one in words if "inf" not in one) + alarm


def _causes() -> Iterator[str]:
    for name, cause in CAUSES.items():
        yield f"## {name}\n\n**{cause.title}.** {cause.symptom}\n"
        yield f"* Cause: {cause.cause}\n* Fix: {cause.fix}\n* Threshold: {cause.threshold}"
        if cause.explains:
            yield f"* Where it shows, these are not told apart from it: {', '.join(sorted(cause.explains))}."
        yield ""


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "costs": _costs,
    "places": _places,
    "limits": _limits,
    "ladder": _ladder,
    "measured": _measured,
    "causes": _causes,
    "cannot": lambda: iter([CANNOT]),
}
"""The parts of the page by the names that it gives them."""
