"""Are weights, masks, losses and gradients right on the device too? Random cases against float64 oracles."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator

from lab.break_it.__main__ import room, tried
from lab.gpu.machine import Cuda
from lab.gpu.plan import Plan
from lab.gpu.results import Result

ROOMS = {"weights": "The TIS hook", "losses": "The loss hook"}
A_ROUND = 20  # cases of one seed


def hostile(plan: Plan, machine: Cuda) -> Iterator[Result]:
    logging.getLogger("mis_plugins").setLevel(logging.CRITICAL)
    for name, title in ROOMS.items():
        made, answers, seeds = room(name), Counter[str](), 0
        vars(made)["DEVICE"] = machine.device
        until = time.monotonic() + plan.hostile
        while not seeds or time.monotonic() < until:
            answers += tried(name, seeds, A_ROUND)
            seeds += 1
        yield Result(
            f"{title} on random cases",
            ("answer", "cases"),
            tuple(sorted(answers.items())),
            answers["right"] > 0,
            f"Seeds below {seeds}, {A_ROUND} cases of each, judged in float64 on the CPU; a wrong one ends the "
            "section. "
            "`unclear`: rounding may decide. `idle`: the oracle's gradient is 0. `our error`: refused in words.",
        )
