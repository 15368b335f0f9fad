"""Try to break the pack: random cases in every room, until a fault is found or the time is up.

A fault is printed with the smallest case that hypothesis finds, and with the command that replays it. Without a fault
the counts of all rooms are added to `lab/results/break_it.json`, and `break_it.md` shows them.

Exit status: 0 no fault, 1 a fault, 2 could not run.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.break_it.__main__:main", extra="dev")

import json
import logging
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / folder) for folder in ("support", "loss", "shared", "correction", "hosts", "metrics")]

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402

from lab.provenance import as_markdown, markdown_table, parser_of, provenance, write_record  # noqa: E402
from mis_plugins import errors  # noqa: E402
from mis_plugins.config import view  # noqa: E402
from mis_plugins.errors import UserError  # noqa: E402

ROOMS = ("weights", "losses", "config", "answers", "scripts", "translate", "dumps", "files", "ranks")
RECORD = ROOT / "lab" / "results" / "break_it.json"
ROUND = 100  # cases of one seed
OURS = "our error"
SAID = (
    "Random cases that ended without a fault. A fault ends a run, prints the command that replays it, and becomes a "
    "test. "
    "`unclear`: rounding may decide. `idle`: the oracle's gradient is 0. `unsure`: the reader of scripts says so."
)


def room(name: str) -> ModuleType:
    """The module of a room, with what its cases stand on put in place."""
    module = import_module(f"lab.break_it.{name}")
    getattr(module, "install", lambda: None)()
    return module


def tried(name: str, number: int, cases: int = ROUND) -> Counter[str]:
    """What the pack answered to the cases of one seed.

    Raises:
        Exception: a fault; its notes have the smallest case.
    """
    made, answers = room(name), Counter[str]()
    phases = (Phase.generate, *[Phase.shrink] * getattr(made, "SHRINKS", True))

    @seed(number)
    @settings(max_examples=cases, deadline=None, database=None, report_multiple_bugs=False,
              suppress_health_check=list[Any](HealthCheck), phases=phases)  # fmt: skip
    @given(made.cases())
    def one(case: Any) -> None:
        answers[answered(made.judge, case)] += 1

    one()
    return answers


def answered(judge: Callable[[Any], str], case: Any) -> str:
    """What the pack answered to one case: nothing that an earlier case said or cached changes it."""
    errors.warn_once.cache_clear()
    view.LAST.clear()
    try:
        return judge(case)
    except UserError:
        return OURS


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.getLogger("mis_plugins").setLevel(logging.CRITICAL)
    rooms, number = [arguments.room] if arguments.room else list(ROOMS), arguments.seed
    until, found = time.monotonic() + 60 * arguments.minutes, {name: Counter[str]() for name in rooms}
    while True:
        for name in rooms:
            try:
                found[name] += tried(name, number)
            except Exception as error:
                print("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
                print(
                    f"\nfault in room {name}; again: bash scripts/break-it.sh --room {name} --seed {number} --minutes 0"
                )
                return 1
            print(f"seed {number}: {name}: {dict(found[name])}", file=sys.stderr, flush=True)
        number += 1
        if time.monotonic() > until:
            break
    if arguments.record:
        _write(found, (arguments.seed, number - 1))
    return 0


def _write(found: dict[str, Counter[str]], seeds: tuple[int, int]) -> None:
    """Add the counts to those of the record, and show all."""
    known = json.loads(RECORD.read_text())["rooms"] if RECORD.exists() else {}
    counted = {name: Counter(known.get(name, {})) + found.get(name, Counter()) for name in ROOMS}
    rooms = {name: dict(answers) for name, answers in counted.items() if answers}
    measured = provenance()
    table = markdown_table(("room", "cases", "right", "our errors", "others", "faults"), map(_row, rooms.items()))
    text = f"# Break it\n\n{SAID}\n\n{table}\n{as_markdown(measured)}"
    write_record(RECORD, {"rooms": rooms, "last_seeds": seeds, "measured with": measured}, text)


def _row(named: tuple[str, dict[str, int]]) -> tuple[str, ...]:
    name, answers = named
    others = ", ".join(f"{n:,} {key}" for key, n in sorted(answers.items()) if key not in (OURS, "right"))
    numbers = sum(answers.values()), answers.get("right", 0), answers.get(OURS, 0)
    return name, *(f"{n:,}" for n in numbers), others, "0"


def _parser() -> ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long; 0 is one round of each room")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each next round takes the next")
    parser.add_argument("--room", choices=ROOMS, help="this room alone")
    parser.add_argument("--record", action="store_true", help=f"add the counts to {RECORD.name}")
    return parser
