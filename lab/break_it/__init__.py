"""A campaign that tries to break this pack, room by room: `bash scripts/break-it.sh`.

A room is a file with `cases()`, a strategy of hypothesis, and `judge(case)`, which names what the pack answered and
raises where that is a fault. An error of ours, in words, is an answer. Oracles are those of `tests/support`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / folder) for folder in ("support", "loss", "shared", "correction", "hosts", "metrics")]
