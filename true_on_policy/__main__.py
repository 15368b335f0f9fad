"""Prove that trainer and engine agree bit by bit, and search for the first difference.

    python -m true_on_policy verify --engine hf --trainer megatron      a proof on this machine, without a GPU
    python -m true_on_policy diff train_data/7_0.pt                     a host's dump: its engine beside its trainer
    python -m true_on_policy flags --miles --model qwen3-4B             what a launch on GPUs needs
    python -m true_on_policy doctor --engine http://HOST:30000          what both sides really run
    python -m true_on_policy weights --engine http://HOST:30000 --trainer CHECKPOINT

Exit codes: 0 equal; 1 different; 2 not compared, and stderr says why; 130 interrupted; 141 nobody reads the output; 143
ended by SIGTERM. An error is never 1.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("true_on_policy.__main__:main")

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from mis_plugins.errors import UserError
from mis_plugins.shared.numerals import whole
from mis_plugins.shared.shell import INTERRUPTED, Gone, add_version, importing, is_foreign, not_installed
from mis_plugins.shared.shell import REFUSED as FAILED
from mis_plugins.shared.terminal import print_error, print_table, printable, tell
from true_on_policy.contract.specs import at
from true_on_policy.errors import ContractError, DifferenceError, EngineError

if TYPE_CHECKING:
    from true_on_policy.contract.gpu import GpuContract

Subparsers = argparse._SubParsersAction
DIFFERENT = 1


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser(argv).parse_args(argv)
        return arguments.run(arguments)
    except DifferenceError as error:
        print_error(str(error))
        return DIFFERENT
    except (UserError, OSError) as error:
        print_error(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # uncaught, Python would exit with 1, the code for "different"
        if isinstance(error, ModuleNotFoundError) and is_foreign(error):
            print_error(not_installed(error, "verify"))
        else:
            traceback.print_exc()
    return FAILED


VERIFY = """Is every log-prob that the engine sampled with, bit for bit, the trainer's?

The engine samples, scores what it sampled, and takes new weights in between; the trainer computes the same tokens; the
links of the chain are compared by bytes. Then the control: with stock kernels on both sides the chain must break.

    python -m true_on_policy verify --engine hf --trainer megatron --dtype bf16        minutes, on a tiny model
    python -m true_on_policy verify --engine sglang --trainer megatron --model FOLDER --prompts FILE --json proof.json

Exit codes: 0 equal, in every situation that the engine and its requests could meet; 1 different; 2 could not compare,
which is an error, a token without a log-prob, a control that holds too, or a situation that was not met.
"""


def add_verify(subparsers: Subparsers) -> None:
    from true_on_policy.contract.families import covered
    from true_on_policy.contract.model_config import PRETRAINED
    from true_on_policy.contract.sides import ENGINES, TRAINERS
    from true_on_policy.contract.specs import DtypeName, Side
    from true_on_policy.verify.prompts import BUILTIN

    parser = subparsers.add_parser("verify", help="is every log-prob of the engine the trainer's?", description=VERIFY)
    parser.add_argument("--engine", required=True, choices=list(ENGINES), help="what samples")
    parser.add_argument("--trainer", required=True, choices=list(TRAINERS), help="what computes log-probs again")
    fetched = f"{' or '.join(PRETRAINED)} (fetched once)"
    models = f"%(default)s or another tiny model, {fetched}, or a folder with a checkpoint of {covered()}"
    parser.add_argument("--model", default="tiny-qwen3", help=models)
    prompts = f"real prompts, one a line; {BUILTIN} takes 128 of ours; else random tokens"
    parser.add_argument("--prompts", metavar="FILE", help=prompts)
    dtype = "of the matrix products (default: %(default)s)"
    parser.add_argument("--dtype", default="fp32", choices=get_args(DtypeName), help=dtype)
    tokens = "how many to compare, at least (default: %(default)s); a run goes on until each situation was asked for"
    parser.add_argument("--tokens", type=whole, default=2000, help=tokens)
    order = "whose order of rounding RMSNorm follows on both sides, which matters in bf16 (default: %(default)s)"
    parser.add_argument("--norm-order", default="engine", choices=get_args(Side), help=order)
    ranks = "ranks that share a row-parallel weight (default: %(default)s)"
    parser.add_argument("--trainer-tensor-parallel", type=whole, default=1, metavar="RANKS", help=ranks)
    parser.add_argument("--engine-tensor-parallel", type=whole, default=1, metavar="RANKS", help=ranks)
    leaves = "parts of the tree that adds up a row-parallel product: a power of two (default: %(default)s)"
    parser.add_argument("--leaves", type=whole, default=1, help=leaves)
    seed = "of weights of a tiny model, prompts and samples (default: %(default)s)"
    parser.add_argument("--seed", type=whole, default=0, help=seed)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the certificate here")
    drawn = "in a checkout of mis-plugins, `python -m lab.certificate_picture FILE` draws it, with verify's arguments"
    parser.add_argument("--picture", action=Gone, successor=drawn)
    parser.add_argument("--backend", action=Gone, successor="both sides run the kernels `native`; leave it out")
    parser.set_defaults(run=verify)


def verify(arguments: argparse.Namespace) -> int:
    from true_on_policy.contract.model_config import check_model
    from true_on_policy.verify.prompts import prompt_lines

    check_model(arguments.model)
    if arguments.prompts is not None:
        prompt_lines(arguments.prompts)
    tell("loading torch and transformers")
    with importing():
        from true_on_policy.models import tiny  # noqa: F401
        from true_on_policy.verify import verification

    return verification.run(arguments)


CONTRACT = """What trainer and engine must share on GPUs.

    python -m true_on_policy contract show qwen3-dense --backend megatron

prints, operation by operation, whose bits both sides share; what could be chosen instead; the layouts that hold; the
environment; and what is not covered.
"""
NOT_RUN = "Read in the sources of Miles, SGLang and Megatron; no host has run it on a GPU."
NOT_LAUNCHED = "No release launches this family; what it would take, and at the end what is missing."


def add_contract(subparsers: Subparsers) -> None:
    from true_on_policy.contract.gpu import GPU_FAMILIES, TrainBackend

    parser = subparsers.add_parser("contract", help="what trainer and engine must share on GPUs", description=CONTRACT)
    actions = parser.add_subparsers(required=True, metavar="show")
    asks = "print the contract of a family of models"
    show = actions.add_parser("show", help=asks, description=CONTRACT, formatter_class=parser.formatter_class)
    show.add_argument("family", help=f"one of {', '.join(GPU_FAMILIES)}")
    trains = "what trains (default: %(default)s)"
    show.add_argument("--backend", choices=get_args(TrainBackend), default="megatron", help=trains)
    show.set_defaults(run=show_contract)


def show_contract(arguments: argparse.Namespace) -> int:
    from true_on_policy.contract.gpu import LAYOUTS, NOT_COVERED, WHY, compiled, gpu_contract

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


DOCTOR = """What trainer and engine really run, next to each other, and what to set.

    python -m true_on_policy doctor --engine http://HOST:30000 --engine-dump FOLDER --trainer-dump FOLDER

Every rank of each side writes what it runs. A trainer's rank writes in its init hook; a rank of SGLang writes in our
plugin where TRUE_ON_POLICY_ENGINE_DUMP names a folder. Without a trainer's file, this machine pins the contract for a
moment and stands in for the trainer; the environment of its shell is left out. `how` says whether a value was observed,
or configured: read from an argument or a variable.

Exit codes: 0 green; 1 red; 2 a row that the contract needs could not be observed.
"""


def add_doctor(subparsers: Subparsers) -> None:
    from true_on_policy.engines.asking import HELP, url_of_engine
    from true_on_policy.engines.handover import FOLDER
    from true_on_policy.flags.command import add_contract_arguments

    asks = "what trainer and engine really run, and what to set"
    parser = subparsers.add_parser("doctor", help=asks, description=DOCTOR)
    parser.add_argument("--engine", metavar="URL", type=url_of_engine, help=HELP)
    inside = f"what our plugin wrote inside SGLang: a file, or a folder of several engines (${FOLDER})"
    folder = os.environ.get(FOLDER) or None
    parser.add_argument("--engine-dump", metavar="PATH", type=Path, default=folder, help=inside)
    trainer = "what the trainer's init hook wrote: a file or its folder"
    parser.add_argument("--trainer-dump", metavar="PATH", type=Path, help=trainer)
    add_contract_arguments(parser)
    parser.set_defaults(run=doctor)


def doctor(arguments: argparse.Namespace) -> int:
    contract = _asked(arguments)
    with importing():  # after the arguments are known to be right: torch takes seconds
        from true_on_policy.doctor.diagnosis import diagnosed
    return diagnosed(contract, arguments)


def _asked(arguments: argparse.Namespace) -> GpuContract | None:
    """Return the contract that the arguments ask for; None beside --trainer-dump, whose file states the contract."""
    from true_on_policy.flags.command import CONTRACT_ARGUMENTS, contract_of

    if arguments.trainer_dump is None:
        return contract_of(arguments)
    given = [flag for flag in CONTRACT_ARGUMENTS if getattr(arguments, flag[2:].replace("-", "_")) is not None]
    if not given:
        return None
    flags = ", ".join(given)
    raise ContractError(f"{flags}: without effect beside --trainer-dump, whose file states the contract; drop either")


WEIGHTS = """Are the weights of a running engine those of a checkpoint, bit for bit?

    python -m true_on_policy weights --engine http://HOST:30000 --trainer CHECKPOINT

Every tensor of the engine is compared by name with what SGLang and vLLM make of the checkpoint's, fused and rounded to
the engine's dtype: the one that the trainer saved at this version (`--save-hf` of Miles and slime), or the one that a
run resumed from. The engine tells its tensors' digests over HTTP, where it was started with TRUE_ON_POLICY_WEIGHTS=1;
vLLM needs VLLM_SERVER_DEV_MODE=1 too.

Exit codes: 0 equal; 1 different, and the first tensor that differs is named; 2 could not compare.
"""
SECONDS = 600  # for one answer of an engine about its weights


def add_weights(subparsers: Subparsers) -> None:
    from true_on_policy.engines.asking import HELP, url_of_engine

    asks = "are the weights of a running engine those of a checkpoint?"
    parser = subparsers.add_parser("weights", help=asks, description=WEIGHTS)
    parser.add_argument("--engine", required=True, metavar="URL", type=url_of_engine, help=HELP)
    parser.add_argument("--trainer", required=True, metavar="CHECKPOINT", type=Path, help="a folder of Hugging Face's")
    parser.set_defaults(run=weights)


def weights(arguments: argparse.Namespace) -> int:
    with importing():  # torch: seconds
        from true_on_policy.engines.asking import answer_of, reading
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


COMMANDS: Mapping[str, Callable[[Subparsers], None]] = {
    "verify": add_verify,
    "diff": at("true_on_policy.diff.command:add_parser"),
    "contract": add_contract,
    "flags": at("true_on_policy.flags.command:add_parser"),
    "doctor": add_doctor,
    "weights": add_weights,
}
"""By its name, what adds a command: it imports what the command's arguments need, and sets run(arguments) -> code.

`diff` and `flags` have a `command.py` in their rooms, since other code calls it."""


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser with the command that `argv` names, or with every command where `argv` names none.

    Nothing is imported for a command that `argv` does not name, because its libraries may be missing, and nothing for
    `--version`.
    """
    # Descriptions keep their lines.
    kind = partial(argparse.ArgumentParser, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = kind(prog="python -m true_on_policy", description=__doc__)
    add_version(parser)
    subparsers = parser.add_subparsers(required=True, metavar="|".join(COMMANDS), parser_class=cast(Any, kind))
    asked = [command for command in argv[:1] if command in COMMANDS]
    for command in asked or COMMANDS if argv[:1] != ["--version"] else ():
        with importing():
            COMMANDS[command](subparsers)
    return parser
