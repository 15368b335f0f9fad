"""The embedded host's tracker: a hook's metrics of an optimizer step, not averaged over a rollout."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from lab.host.folders import STEPS


def log(args: Namespace, metrics: Mapping[str, float], step_key: str) -> None:
    """Append a line to the run's `steps.jsonl`; a resumed run repeats steps that its checkpoint had not seen."""
    with (Path(args.output) / STEPS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(dict(metrics)) + "\n")
