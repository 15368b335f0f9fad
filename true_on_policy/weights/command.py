"""`python -m true_on_policy weights`: are the weights of a running SGLang those of a checkpoint, bit for bit?

Every tensor of the engine is compared by name with what SGLang makes of the checkpoint's, fused and rounded to the
engine's dtype: the one that the trainer saved at this version (`--save-hf` of Miles and slime), or the one that a run
resumed from. The engine tells its tensors' digests over HTTP, where it was started with TRUE_ON_POLICY_WEIGHTS=1.

Exit codes: 0 equal; 1 different, and the first tensor that differs is named; 2 could not compare.
"""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        from true_on_policy.models.tiny import read_weights
        from true_on_policy.weights.comparison import compare

    found = compare(lambda body: posted(arguments.engine, body), read_weights(arguments.trainer))
    print(found)
    return 0 if found.equal else 1


def posted(url: str, body: Mapping[str, Any]) -> Any:
    """Post a body to the engine's weight checker.

    Raises:
        EngineError: nobody answers there, or the engine refuses.
    """
    from true_on_policy.engines.protocol import EngineError

    address = f"{url.rstrip('/')}/weights_checker"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        said = refused.read().decode(errors="replace")[:200]
        raise EngineError(f"{address} answered {refused.code}: {said}") from refused
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise EngineError(f"{address}: {str(error) or repr(error)}") from error
