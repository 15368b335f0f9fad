"""`python -m true_on_policy weights`: are the weights of a running SGLang those of a checkpoint, bit for bit?

Every tensor of the engine is compared by name with what SGLang makes of the checkpoint's, fused and rounded to the
engine's dtype: the one that the trainer saved at this version (`--save-hf` of Miles and slime), or the one that a run
resumed from. The engine tells its tensors' digests over HTTP, where it was started with TRUE_ON_POLICY_WEIGHTS=1.

Exit codes: 0 equal; 1 different, and the first tensor that differs is named; 2 could not compare.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mis_plugins.shared.shell import importing

SECONDS = 600


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "weights",
        help="are the weights of a running engine those of a checkpoint?",
        description=__doc__,
    )
    parser.add_argument(
        "--engine", required=True, metavar="URL", help="a running SGLang, for example http://127.0.0.1:30000"
    )
    parser.add_argument(
        "--trainer", required=True, metavar="FOLDER", type=Path, help="a Hugging Face checkpoint"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with importing():  # torch: seconds
        from true_on_policy.engines.asking import answer_of
        from true_on_policy.models.tiny import read_weights
        from true_on_policy.weights.comparison import compare

    address = f"{arguments.engine.rstrip('/')}/weights_checker"
    found = compare(lambda body: answer_of(address, body, SECONDS), read_weights(arguments.trainer))
    print(found)
    return 0 if found.equal else 1
