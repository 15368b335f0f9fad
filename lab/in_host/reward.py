"""A reward that varies between the answers to one prompt: the share of even token ids, for `--custom-rm-path`.

Beside the reward a sample may get a fault: a NaN, a masked span, or routes of the engine that are wrong. A host scores
a sample once the routes are on it, as rows of tokens by layers by experts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("mis_plugins")

ROLLOUT, BROKEN = 16, 5
"""A rollout has ROLLOUT samples. The sample at place BROKEN of each rollout gets a NaN. The host numbers samples on
from one rollout to the next."""


HOLES = (6, 7, 8, 9, 14, 15)
"""Places of a response that are masked: two spans, which leave three turns."""
LAYER = 1
"""The layer whose routes are left out."""


async def score(args: Any, sample: Any, **unused: Any) -> float:
    """Score one sample of the host by its response's tokens."""
    answer = sample.tokens[-sample.response_length :] if sample.response_length else []
    return sum(token % 2 == 0 for token in answer) / max(len(answer), 1)


async def score_a_dialogue(args: Any, sample: Any, **unused: Any) -> float:
    """Score one sample, and mask two spans of its response, as where tools answer between three turns."""
    sample.loss_mask = [int(at not in HOLES) for at in range(sample.response_length)]
    return await score(args, sample)


async def score_and_break(args: Any, sample: Any, **unused: Any) -> float:
    """Score one sample, and put a NaN in place of an engine's log-prob in one sample of each rollout."""
    if sample.index % ROLLOUT == BROKEN:
        sample.rollout_log_probs[0] = math.nan
    return await score(args, sample)


async def drop_a_layer(args: Any, sample: Any, **unused: Any) -> float:
    """Drop one layer's rows, so that each layer from there on gets the next layer's; the last keeps its."""
    return await _planted(args, sample, lambda rows: [*range(LAYER), *range(LAYER + 1, rows), rows - 1])


async def swap_stages(args: Any, sample: Any, **unused: Any) -> float:
    """Let the rows of the last layers come first, as where two pipeline stages are joined in the wrong order."""
    return await _planted(args, sample, lambda rows: [*range(rows // 2, rows), *range(rows // 2)])


async def repeat_a_row(args: Any, sample: Any, **unused: Any) -> float:
    """Give all tokens of one sample of each rollout the rows of its first token."""
    if sample.index % ROLLOUT == BROKEN:
        rows = sample.rollout_routed_experts
        sample.rollout_routed_experts = rows[[0] * len(rows)]
    return await score(args, sample)


async def _planted(args: Any, sample: Any, order: Callable[[int], list[int]]) -> float:
    rows = sample.rollout_routed_experts
    sample.rollout_routed_experts = rows[:, order(rows.shape[1])]
    return await score(args, sample)


async def check_weights(args: Any, sample: Any, **unused: Any) -> float:
    """Score a sample; the first sample of each rollout has `true_on_policy weights` compare the weights.

    The trainer saves its weights before each update. The weights saved one update earlier must differ.
    """
    if sample.index % ROLLOUT == 0:
        rollout = sample.index // ROLLOUT
        for updates in range(min(rollout, 2)):
            folder = args.save_hf.format(rollout_id=rollout - 1 - updates)
            code, told = await _asked(await _engine(args), folder)
            logger.info("weights of rollout %d, saved %d updates earlier: exit %d: %s", rollout, updates, code, told)
    return await score(args, sample)


async def _engine(args: Any) -> str:
    """Return the URL of the router's one engine."""
    address = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers"

    def ask() -> str:
        with urllib.request.urlopen(address, timeout=60) as answer:
            (worker,) = json.load(answer)["workers"]
        return worker["url"]

    return await asyncio.to_thread(ask)


async def _asked(engine: str, folder: str) -> tuple[int, str]:
    command = (sys.executable, "-m", "true_on_policy", "weights", "--engine", engine, "--trainer", folder)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, " / ".join(told.decode(errors="replace").splitlines())
