"""Are weights, masks, losses and gradients right on the device too? Random cases against float64 oracles."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from lab.break_it.__main__ import room, tried
from lab.gpu.machine import Cuda
from lab.gpu.plan import Plan
from lab.gpu.receipt import DIFFERENCE, Result

ROOMS = {"weights": "The TIS hook", "losses": "The loss hook"}
A_ROUND = 20  # cases of one seed


def hostile(plan: Plan, machine: Cuda) -> Iterator[Result]:
    for name, title in ROOMS.items():
        vars(room(name)).update(DEVICE=machine.device, SHRINKS=False)  # a section has no time to shrink a case
        answers, wrong, seeds = _answered(name, time.monotonic() + plan.hostile)
        yield Result(
            f"{title} on random cases",
            ("answer", "cases", DIFFERENCE),
            (*((answer, cases, "") for answer, cases in sorted(answers.items())), *wrong),
            answers["right"] > 0 and not wrong,
            f"Seeds below {seeds}, {A_ROUND} cases of each, judged in float64 on the CPU; a wrong one ends the room. "
            "`unclear`: rounding may decide. `idle`: the oracle's gradient is 0. `our error`: refused in words.",
        )


def _answered(name: str, until: float) -> tuple[Counter[str], list[tuple[str, int, str]], int]:
    """The answers to one seed after another, the row of a wrong one, and how many seeds were tried."""
    answers, seed = Counter[str](), 0
    while True:
        try:
            answers += tried(name, seed, A_ROUND)
        except AssertionError as error:
            told = str(error).partition("\n")[0] or "an assertion without words"
            return answers, [("wrong", 1, f"seed {seed}: {told}")], seed + 1
        seed += 1
        if time.monotonic() >= until:
            return answers, [], seed
