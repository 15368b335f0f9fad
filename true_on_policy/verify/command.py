"""Is every log-prob that the engine sampled with, bit for bit, the trainer's?

The engine samples, scores what it sampled, and takes new weights in between; the trainer computes the same tokens; the
links of the chain are compared by bytes. Then the control: with stock kernels on both sides the chain must break.

    python -m true_on_policy verify --engine hf --trainer megatron --dtype bf16        minutes, on a tiny model
    python -m true_on_policy verify --engine sglang --trainer megatron --model FOLDER --prompts FILE --json proof.json

Exit codes: 0 equal, in every situation that the engine and its requests could meet; 1 different; 2 could not compare,
which is an error, a control that holds too, or a situation that was not met.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from mis_plugins.shared.numerals import whole
from mis_plugins.shared.shell import Gone, importing
from true_on_policy.contract.families import covered
from true_on_policy.contract.model_config import PRETRAINED, check_model
from true_on_policy.contract.sides import ENGINES, TRAINERS
from true_on_policy.contract.specs import DtypeName, Side
from true_on_policy.verify.prompts import BUILTIN, prompt_lines


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("verify", help="is every log-prob of the engine the trainer's?", description=__doc__)
    parser.add_argument("--engine", required=True, choices=list(ENGINES), help="what samples")
    parser.add_argument("--trainer", required=True, choices=list(TRAINERS), help="what computes log-probs again")
    fetched = f"{' or '.join(PRETRAINED)} (fetched once)"
    models = f"%(default)s or another tiny model, {fetched}, or a folder with a checkpoint of {covered()}"
    parser.add_argument("--model", default="tiny-qwen3", help=models)
    prompts = f"real prompts, one a line; {BUILTIN} takes 128 of ours; else random tokens"
    parser.add_argument("--prompts", metavar="FILE", help=prompts)
    parser.add_argument(
        "--dtype", default="fp32", choices=get_args(DtypeName), help="of the matrix products (default: %(default)s)"
    )
    tokens = "how many to compare, at least (default: %(default)s); a run goes on until each situation was asked for"
    parser.add_argument("--tokens", type=whole, default=2000, help=tokens)
    kernels = "the kernels of both sides (default: %(default)s)"
    parser.add_argument("--backend", default="native", choices=("native",), help=kernels)
    order = "whose order of rounding RMSNorm follows on both sides, which matters in bf16 (default: %(default)s)"
    parser.add_argument("--norm-order", default="engine", choices=get_args(Side), help=order)
    ranks = "ranks that share a row-parallel weight (default: %(default)s)"
    parser.add_argument("--trainer-tensor-parallel", type=whole, default=1, metavar="RANKS", help=ranks)
    parser.add_argument("--engine-tensor-parallel", type=whole, default=1, metavar="RANKS", help=ranks)
    leaves = (
        "parts of the tree in which both sides add up a row-parallel product: a power of two (default: %(default)s)"
    )
    parser.add_argument("--leaves", type=whole, default=1, help=leaves)
    parser.add_argument(
        "--seed", type=whole, default=0, help="of weights of a tiny model, prompts and samples (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the certificate here")
    drawn = "in a checkout of mis-plugins, `python -m lab.certificate_picture FILE` draws it, with verify's arguments"
    parser.add_argument("--picture", action=Gone, successor=drawn)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_model(arguments.model)
    if arguments.prompts:
        prompt_lines(arguments.prompts)
    with importing():  # torch and transformers: seconds
        from true_on_policy.models import tiny  # noqa: F401
        from true_on_policy.verify import verification

    return verification.run(arguments)
