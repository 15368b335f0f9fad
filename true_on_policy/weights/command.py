"""Are the weights of a running engine those of a checkpoint, bit for bit?

    python -m true_on_policy weights --engine http://HOST:30000 --trainer CHECKPOINT

Every tensor of the engine is compared by name with what SGLang and vLLM make of the checkpoint's, fused and rounded to
the engine's dtype: the one that the trainer saved at this version (`--save-hf` of Miles and slime), or the one that a
run resumed from. The engine tells its tensors' digests over HTTP, where it was started with TRUE_ON_POLICY_WEIGHTS=1;
vLLM needs VLLM_SERVER_DEV_MODE=1 too.

Exit codes: 0 equal; 1 different, and the first tensor that differs is named; 2 could not compare.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mis_plugins.shared.shell import importing
from mis_plugins.shared.terminal import printable
from true_on_policy.engines.answers import reading
from true_on_policy.engines.asking import HELP, answer_of, url_of_engine
from true_on_policy.errors import EngineError

SECONDS = 600


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    asks = "are the weights of a running engine those of a checkpoint?"
    parser = subparsers.add_parser("weights", help=asks, description=__doc__)
    parser.add_argument("--engine", required=True, metavar="URL", type=url_of_engine, help=HELP)
    folder = "a folder of Hugging Face's"
    parser.add_argument("--trainer", required=True, metavar="CHECKPOINT", type=Path, help=folder)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with importing():  # torch: seconds
        from true_on_policy.engines.vllm import plugin as vllm
        from true_on_policy.models.tiny import read_weights
        from true_on_policy.weights.comparison import LIMITS, compare

    def ask(body: Mapping[str, Any]) -> Any:
        limit = LIMITS[body["action"]]
        try:
            return answer_of(arguments.engine, "/weights_checker", body, SECONDS, limit)
        except EngineError as error:
            if " answered 404" not in str(error):  # vLLM has no such path
                raise
        answer = answer_of(arguments.engine, vllm.PATH, vllm.request(body), SECONDS, limit)
        with reading(vllm.PATH, "vllm"):
            return vllm.answer_as_sglang(answer)

    comparison = compare(ask, read_weights(arguments.trainer))
    print("\n".join(map(printable, str(comparison).splitlines())))
    return 0 if comparison.equal else 1
