"""The correction hook and the host's own mis.py on the tensors of a real training step, each timed in turn.

    --custom-tis-function-path lab.in_host.timed.compute

The step trains with our weights, so mis.py adds its time to the step and changes nothing. Both sides are called twice
a micro-batch, in both orders, and the faster call of each side counts: a first call finds cold caches.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lab.host_modules import HOSTS
from mis_plugins import mis
from mis_plugins.hosts.registry import current

SETTINGS = {
    "use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 2.0, "tis_lower_bound": 0.5,
    "tis_batch_normalize": True, "use_rs": True, "rs_level": "token", "rs_lower_bound": None, "rs_upper_bound": None,
    "rs_veto_threshold": 1e-4,
}  # fmt: skip
"""The settings of `configs/mis.yaml`, under the keys of the hosts' mis.yaml."""
TIMED_FROM = 1
"""The first step that counts, because step 0 warms up."""
CALL = re.compile(r"timed call: ours ([\d.e+-]+) s, mis\.py ([\d.e+-]+) s, both ([\d.e+-]+) s, (\d+) tokens")
TRAINING = re.compile(r"Timer actor_train start")
Hook = Callable[..., tuple[Any, Any, Any]]


def compute(args: Namespace, **batch: Any) -> tuple[Any, Any, Any]:
    """Compute the weights by our hook, and log the seconds of our hook and of mis.py.

    Raises:
        AssertionError: the weights of the two sides differ.
    """
    began = time.perf_counter()
    settings = Namespace(**vars(args) | SETTINGS)
    theirs = HOSTS[current(args).name].tis
    first, ours = _timed(mis.compute_mis_weights_with_cp, args, batch)
    their_first, expected = _timed(theirs, settings, batch)
    their_second, _ = _timed(theirs, settings, batch)
    second, _ = _timed(mis.compute_mis_weights_with_cp, args, batch)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-6)
    tokens = sum(map(len, batch["rollout_log_probs"]))
    fastest = min(first, second), min(their_first, their_second)
    both = time.perf_counter() - began
    print(
        f"timed call: ours {fastest[0]:.3e} s, mis.py {fastest[1]:.3e} s, both {both:.3e} s, {tokens} tokens",
        file=sys.stderr,  # as the host's timer, which Ray hands on apart from what is printed elsewhere
    )
    return ours


def _timed(hook: Hook, args: Namespace, batch: Mapping[str, Any]) -> tuple[float, tuple[Any, Any, Any]]:
    began = time.perf_counter()
    found = hook(args, **batch)
    return time.perf_counter() - began, found


def of_the_log(log: str, training_s: Sequence[float]) -> list[dict[str, float]]:
    """Add up the seconds of the calls of each training step of a run of one rank; nothing where no call was timed.

    Args:
        training_s: what the host logged as the seconds of each training step.
    """
    if not CALL.search(log):
        return []
    steps: list[dict[str, float]] = []
    for line in log.splitlines():
        if TRAINING.search(line):
            steps.append({"ours": 0.0, "theirs": 0.0, "both": 0.0, "tokens": 0.0})
        elif (found := CALL.search(line)) and steps:
            for name, number in zip(steps[-1], found.groups(), strict=True):
                steps[-1][name] += float(number)
    return [step | {"training": seconds} for step, seconds in zip(steps, training_s, strict=True)]


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median share of a training step that each side would take if it alone ran.

    The result also holds the median seconds of a step without either side, and the median tokens of a step.
    """
    counted = steps[TIMED_FROM:]
    bare = [step["training"] - step["both"] for step in counted]

    def share(side: str) -> float:
        return statistics.median(step[side] / (step[side] + rest) for step, rest in zip(counted, bare, strict=True))

    return {
        "tokens": statistics.median(step["tokens"] for step in counted), "bare": statistics.median(bare),
        "ours": share("ours"), "theirs": share("theirs"),
    }  # fmt: skip


HEAD = """
## What the hook costs of a training step

The hook and the host's own `mis.py` on the tensors of the same steps; a tiny model on a CPU, which takes less time a
token than any model that people train, so that the hook's share is larger than theirs.

| row | tokens a step | training without a hook | our hook's share | `mis.py`'s share |
|---|---|---|---|---|
"""


def section(records: Sequence[Mapping[str, Any]]) -> str:
    """Write a line of markdown for each record that was timed; nothing where none was."""
    lines = []
    for record in records:
        found = shares(record["timed"])
        lines.append(
            f"| {record['row']} | {found['tokens']:.0f} | {found['bare']:.2f} s | {found['ours']:.2%} "
            f"| {found['theirs']:.2%} |\n"
        )
    return HEAD + "".join(lines) if lines else ""
