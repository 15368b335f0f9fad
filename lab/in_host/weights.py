"""Compare the engine's weights with the trainer's saved weights during a rollout, for `--custom-rm-path`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import urllib.request
from typing import Any

from lab.in_host import reward

logger = logging.getLogger("mis_plugins")


async def compare(args: Any, sample: Any, **unused: Any) -> float:
    """Score a sample; the first sample of each rollout has `true_on_policy weights` compare the weights.

    The trainer saves its weights before each update. The weights saved one update earlier must differ.
    """
    if sample.index % reward.ROLLOUT == 0:
        rollout = sample.index // reward.ROLLOUT
        for updates in range(min(rollout, 2)):
            folder = args.save_hf.format(rollout_id=rollout - 1 - updates)
            code, told = await _asked(await _engine(args), folder)
            logger.info("weights of rollout %d, saved %d updates earlier: exit %d: %s", rollout, updates, code, told)
    return await reward.score(args, sample)


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
