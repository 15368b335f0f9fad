"""Try to break the pack: random cases in every room, until a fault is found or the time is up.

A fault is printed with the smallest case that hypothesis finds, and with the command that replays it. With `--record`
the counts are added to `lab/results/break_it.json` once a minute and at the end, and `break_it.md` shows them.

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
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from lab.break_it import ROOT
from lab.provenance import as_markdown, markdown_table, parser_of, provenance, write_record
from mis_plugins import errors
from mis_plugins.config import view
from mis_plugins.errors import UserError
from mis_plugins.shared.numerals import count

ROOMS = """weights large losses config answers scripts launchers translate dumps routes files memory ranks split
           segments baselines""".split()
RECORD = ROOT / "lab" / "results" / "break_it.json"
ROUND = 100  # cases of one seed
SEEDS_A_PROCESS = 20  # of a room, before the next room's turn: processes end, and what they hold with them
OURS = "our error"
SAID = (
    "Random cases that ended without a fault, of seed 0 and of those that follow it, 100 of each; each start of "
    "ranks without a planted fault counts as the 12 cases that they are asked. A fault ends a run, "
    "prints the command that replays it, and becomes a test. "
    "`unclear`: rounding may decide. `idle`: the oracle's gradient is 0. `unsure`: the reader of scripts or "
    "of launchers says so. `raises`: so does the launcher."
)


def room(name: str) -> ModuleType:
    """The module of a room."""
    return import_module(f"lab.break_it.{name}")


@contextmanager
def furnished(module: ModuleType) -> Iterator[None]:
    """What the cases of a room stand on, in place while the block runs: stand-ins of a host would answer others too."""
    with pytest.MonkeyPatch.context() as patched:
        getattr(module, "install", lambda _: None)(patched)
        yield


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
        answers.update(answered(made.judge, case))

    with furnished(made), hushed():
        one()
    return answers


@contextmanager
def hushed() -> Iterator[None]:
    """Let the pack log nothing: what it has to say of a million batches would hide a fault."""
    logger = logging.getLogger("mis_plugins")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def in_order(name: str, seeds: Iterable[int], processes: int) -> Iterator[Counter[str]]:
    """What the pack answered to each seed; several processes try different seeds."""
    if processes == 1:
        yield from map(partial(tried, name), seeds)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(partial(tried, name), seeds)


def answered(judge: Callable[[Any], str | list[str]], case: Any) -> list[str]:
    """What the pack answered to each question of a case: nothing that an earlier case said or cached changes it."""
    errors.warn_once.cache_clear()
    view.LAST.clear()
    try:
        said = judge(case)
    except UserError:
        return [OURS]
    return [said] if isinstance(said, str) else said


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    found = _known() if arguments.record else {}
    try:
        return _campaign(arguments, found)
    finally:
        if arguments.record:
            _write(found)


def _campaign(arguments: Namespace, found: dict[str, Done]) -> int:
    """Try room after room, and add to `found` what was answered; 1 where a fault ends it, else 0."""
    until, written = time.monotonic() + 60 * arguments.minutes, 0.0
    at_once = 1 if arguments.processes == 1 else SEEDS_A_PROCESS * arguments.processes
    while True:
        for name in arguments.room or ROOMS:
            done = found.setdefault(name, Done(arguments.seed))
            try:
                for answers in in_order(name, range(done.next_seed, done.next_seed + at_once), arguments.processes):
                    done.answers += answers
                    done.next_seed += 1
                    done.torch.add(version("torch"))
            except Exception as error:
                print("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
                replay = f"--room {name} --seed {done.next_seed} --minutes 0"
                print(f"\nfault in room {name}; again: bash scripts/break-it.sh {replay}")
                return 1
            print(f"{name}, seeds below {done.next_seed}: {dict(done.answers)}", file=sys.stderr, flush=True)
        if time.monotonic() > until:
            return 0
        if arguments.record and time.monotonic() - written > 60:
            _write(found)
            written = time.monotonic()


@dataclass
class Done:
    """What a room has answered, the seed of its next round, and the versions of torch that it ran on."""

    next_seed: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    torch: set[str] = field(default_factory=set)


def _known() -> dict[str, Done]:
    """What the record has of each room, where another run may go on."""
    rooms = json.loads(RECORD.read_text())["rooms"] if RECORD.exists() else {}
    return {name: Done(room["seeds"], Counter(room["answers"]), {*room["torch"]}) for name, room in rooms.items()}


def _write(found: dict[str, Done]) -> None:
    measured = provenance()
    rows = [_row(name, found[name]) for name in ROOMS if name in found]
    rows.append(("all", "", f"{sum(sum(done.answers.values()) for done in found.values()):,}", *[""] * 4, "0"))
    table = markdown_table(("room", "seeds", "cases", "right", "our errors", "others", "torch", "faults"), rows)
    text = f"# Break it\n\n{SAID}\n\n{table}\n{as_markdown(measured)}"
    rooms = {
        name: {"seeds": done.next_seed, "answers": dict(done.answers), "torch": sorted(done.torch)}
        for name, done in found.items()
    }
    write_record(RECORD, {"rooms": rooms, "measured with": measured}, text)


def _row(name: str, done: Done) -> tuple[str, ...]:
    answers = done.answers
    others = ", ".join(f"{n:,} {key}" for key, n in sorted(answers.items()) if key not in (OURS, "right"))
    numbers = done.next_seed, sum(answers.values()), answers["right"], answers[OURS]
    return name, *(f"{n:,}" for n in numbers), others, ", ".join(sorted(done.torch)), "0"


def _parser() -> ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long; 0 is one round of each room")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each next round takes the next")
    parser.add_argument("--room", choices=ROOMS, nargs="+", help="these rooms alone")
    parser.add_argument("--processes", type=count, default=1, help="how many seeds at once")
    parser.add_argument(
        "--record", action="store_true", help=f"go on at the next seed of each room in {RECORD.name}; counts are added"
    )
    return parser
