"""What trainer and engine must share on GPUs.

    python -m true_on_policy contract show qwen3-dense --backend megatron

prints, operation by operation, whose bits both sides share; what could be chosen instead; the layouts that hold; the
environment; and what is not covered.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple
from typing import get_args

from mis_plugins.shared.terminal import print_table
from true_on_policy.contract.gpu import GPU_FAMILIES, LAYOUTS, NOT_COVERED, WHY, TrainBackend, compiled, gpu_contract

NOT_RUN = "Read in the sources of Miles, SGLang and Megatron; this project has not run it on a GPU."
NOT_LAUNCHED = "No release launches this family; what it would take, and at the end what is missing."


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("contract", help="what trainer and engine must share on GPUs", description=__doc__)
    actions = parser.add_subparsers(required=True, metavar="show")
    show = actions.add_parser("show", help="print the contract of a family of models")
    show.add_argument("family", help=f"one of {', '.join(GPU_FAMILIES)}")
    show.add_argument(
        "--backend", choices=get_args(TrainBackend), default="megatron", help="what trains (default: %(default)s)"
    )
    show.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contract = gpu_contract(arguments.family, arguments.backend)
    print(f"{contract.family.name}, trainer {contract.backend}, engine SGLang, {contract.dtype}. {NOT_RUN}")
    print(f"{NOT_LAUNCHED}\n" if contract.family.missing else "")
    gaps = [("this family", missing) for missing in contract.family.missing]
    gaps += [(name, why) for name, reasons in NOT_COVERED.items() for why in reasons]
    tables = {
        ("operation", "bits", "trainer", "engine"): map(astuple, contract.operations),
        ("instead", "holds"): contract.alternatives.items(),
        ("torch.compile", "region", "compiled"): compiled(contract.backend),
        ("layout", "holds"): LAYOUTS[contract.backend].items(),
        ("environment", "why"): [(f"{name}={value}", WHY[name]) for name, value in contract.environment.items()],
        ("not covered", "what is missing"): gaps,
    }
    for number, (headings, rows) in enumerate(tables.items()):
        print(end="\n" * bool(number))
        print_table(headings, list(rows))
    return 0
