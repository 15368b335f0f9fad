"""What trainer and engine really run, next to each other, and what to set.

    python -m true_on_policy doctor --engine http://HOST:30000 --engine-dump FOLDER --trainer-dump FOLDER

Every rank of each side writes what it runs. A trainer's rank writes in its init hook; a rank of SGLang writes in our
plugin where TRUE_ON_POLICY_ENGINE_DUMP names a folder. Without a trainer's file, this machine pins the contract for a
moment and stands in for the trainer; the environment of its shell is left out. `how` says whether a value was observed,
or configured: read from an argument or a variable.

Exit codes: 0 green; 1 red; 2 a row that the contract needs could not be observed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mis_plugins.shared.shell import importing
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.engines.asking import HELP, url_of_engine
from true_on_policy.engines.handover import FOLDER
from true_on_policy.errors import ContractError
from true_on_policy.flags.command import CONTRACT_ARGUMENTS, add_contract_arguments, contract_of


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "doctor", help="what trainer and engine really run, and what to set", description=__doc__
    )
    parser.add_argument("--engine", metavar="URL", type=url_of_engine, help=HELP)
    inside = f"what our plugin wrote inside SGLang: a file, or a folder of several engines (${FOLDER})"
    folder = os.environ.get(FOLDER)
    parser.add_argument("--engine-dump", metavar="PATH", type=Path, default=folder, help=inside)
    trainer = "what the trainer's init hook wrote: a file or its folder"
    parser.add_argument("--trainer-dump", metavar="PATH", type=Path, help=trainer)
    add_contract_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    contract = _asked(arguments)
    with importing():  # after the arguments are known to be right: torch takes seconds
        from true_on_policy.doctor.diagnosis import diagnosed
    return diagnosed(contract, arguments)


def _asked(arguments: argparse.Namespace) -> GpuContract | None:
    """Return the contract that the arguments ask for; None beside --trainer-dump, whose file states the contract."""
    if arguments.trainer_dump is None:
        return contract_of(arguments)
    given = [flag for flag in CONTRACT_ARGUMENTS if getattr(arguments, flag[2:].replace("-", "_")) is not None]
    if not given:
        return None
    raise ContractError(
        f"{', '.join(given)}: without effect, the trainer's file states its contract; leave --trainer-dump out or these"
    )
