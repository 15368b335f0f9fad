"""`python -m true_on_policy contract show FAMILY`: a contract in full, and what is not covered."""

from __future__ import annotations

import argparse
from typing import get_args

from mis_plugins.shared.table import print_table
from true_on_policy.contract.gpu import (
    GPU_FAMILIES,
    LAYOUTS,
    NOT_COVERED,
    WHY,
    GpuContract,
    TrainBackend,
    family,
    gpu_contract,
)
from true_on_policy.contract.operations import COMPILED, COMPILED_ALIKE

NOT_RUN = "Read in the sources of Miles, SGLang and Megatron; this project has not run it on a GPU."
NOT_LAUNCHED = "No release launches this family; what it would take, and at the end what is missing."


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "contract", help="what trainer and engine must share on GPUs", description=__doc__
    )
    actions = parser.add_subparsers(required=True, metavar="show")
    show = actions.add_parser("show", help="print one", description=__doc__)
    show.add_argument("family", help=f"one of {', '.join(GPU_FAMILIES)}")
    show.add_argument("--backend", choices=get_args(TrainBackend), default="megatron", help="the trainer")
    show.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    family(arguments.family)  # raises its own error before gpu_contract does
    contract = gpu_contract(arguments.family, arguments.backend)
    print(f"{contract.family.name}, trainer {contract.backend}, engine SGLang, {contract.dtype}. {NOT_RUN}")
    print(f"{NOT_LAUNCHED}\n" if contract.family.missing else "")
    _print_operations(contract)
    print_table(("instead", "holds"), list(contract.alternatives.items()))
    print()
    compiled = [*COMPILED[contract.backend], *COMPILED_ALIKE]
    print_table(("torch.compile", "region", "compiled"), compiled)
    print()
    print_table(("layout", "holds"), list(LAYOUTS[contract.backend].items()))
    print()
    rows = [(f"{name}={value}", WHY[name]) for name, value in contract.environment.items()]
    print_table(("environment", "why"), rows)
    print()
    _print_gaps(contract)
    return 0


def _print_operations(contract: GpuContract) -> None:
    rows = [(row.name, row.bits, row.trainer, row.engine) for row in contract.operations]
    print_table(("operation", "bits", "trainer", "engine"), rows)
    print()


def _print_gaps(contract: GpuContract) -> None:
    gaps = [("this family", missing) for missing in contract.family.missing]
    gaps += [(name, why) for name, reasons in NOT_COVERED.items() for why in reasons]
    print_table(("not covered", "what is missing"), gaps)
