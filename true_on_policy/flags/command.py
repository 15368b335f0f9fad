"""The arguments and the environment of a launch under a contract, one a line.

    python -m true_on_policy flags --miles --model qwen3-4B          for the command that starts the training
    python -m true_on_policy flags --miles --model qwen3-4B --env    for the environment of every process

The table that makes the arguments also checks, in the trainer, that the host really parsed them, for each group of
engines in Miles's --sglang-config too.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from mis_plugins.config.file import parsed, text_of
from mis_plugins.config.view import view
from mis_plugins.errors import cut, shown
from mis_plugins.shared.numerals import whole
from true_on_policy.contract import gpu
from true_on_policy.contract.gpu import REASONS, TABLE, TRAINER_GEMMS, Family, GemmName, GpuContract
from true_on_policy.contract.model_config import checkpoint_family
from true_on_policy.errors import ContractError
from true_on_policy.flags.rules import RELEASES, UNFUSED, Flag, Refusal, check_installed, faults, plain, refuse

HOOK = "true_on_policy.fsdp_worker.watch"  # Ray's worker_process_setup_hook, for Miles's FSDP trainer
REFUSALS = tuple(
    Refusal(name, tuple(rule["allowed"]), rule["why"].format(**REASONS)) for name, rule in TABLE["refusals"].items()
)


def launch_flags(contract: GpuContract) -> tuple[Flag, ...]:
    """List the arguments of a launch with Miles; raises ContractError where no release of the host has the family."""
    words = {**vars(contract), "contract": host_contract(contract.family)}
    rows = (row for row in TABLE["launch"] if row.get("only", contract.backend) == contract.backend)
    flags = [Flag.of(row["owner"], row["flag"], _value(row.get("value", True), words)) for row in rows]
    if contract.backend == "megatron":
        flags += UNFUSED
    if contract.context_parallel > 1:
        flags.append(Flag.of("megatron", "--cp-comm-type", "a2a"))
    return tuple(flags)


def _value(stated: Any, words: Mapping[str, Any]) -> Any:
    """Return what follows a flag: a text, or the attribute of the contract that `{NAME}` stands for."""
    return words[stated[1:-1]] if str(stated).startswith("{") else stated


def host_contract(family: Family) -> str:
    """Return the name under which the hosts know a family; a ContractError says what is missing where they do not."""
    if family.host_contract is None:
        raise ContractError(f"{family.name} cannot be launched: {'; '.join(family.missing)}")
    return family.host_contract


def check_host(args: Any, environment: Mapping[str, str] = os.environ) -> GpuContract:
    """Return the contract that a host's parsed arguments ask for, after checking that every argument keeps it.

    Args:
        environment: the variables of this process, which choose the engine's GEMM; `check_environment` checks
            the other variables.

    Raises:
        ContractError: a setting breaks the contract, or the model is not covered; the message has a line a fault.
    """
    contract = _asked_contract(args, environment)
    if getattr(args, "rollout_external", False):
        logger.warning("--rollout-external: Miles starts no engine with these flags; ask `doctor --engine URL`")
    asked = REFUSALS, launch_flags(contract)
    lines = faults(args, *asked)
    for where, own in groups(args):
        lines += [f"{where}: {fault}" for fault in faults(own, *asked) if fault not in lines]
    refuse(lines)
    return contract


def _asked_contract(args: Any, environment: Mapping[str, str]) -> GpuContract:
    family, size = checkpoint_family(Path(args.hf_checkpoint) / "config.json")
    backend = args.train_backend
    megatron = backend == "megatron"
    context = args.context_parallel_size if megatron else 1
    if context > 1 and plain(getattr(args, "cp_comm_type", None)) != "a2a":
        raise ContractError(f"cp_comm_type: got {args.cp_comm_type!r}: {REASONS['ring']}; --cp-comm-type a2a")
    try:
        return gpu.gpu_contract(
            family.name,
            backend,
            attention=getattr(args, "sglang_attention_backend", None) or "fa3",
            trainer_tp=args.tensor_model_parallel_size if megatron else 1,
            engine_tp=args.rollout_num_gpus_per_engine,
            context_parallel=context,
            engine_gemm=_GEMMS.get(environment.get(gpu.DEEP_GEMM, ""), TRAINER_GEMMS[backend]),
            size=size,
        )
    except ContractError as error:
        raise error.spelled(OF_MILES) from error


_GEMMS: dict[str, GemmName] = {"0": "triton_persistent", "1": "deep_gemm"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    asks = "arguments and environment of a launch under a contract"
    parser = subparsers.add_parser("flags", help=asks, description=__doc__)
    hosts = parser.add_mutually_exclusive_group(required=True)
    hosts.add_argument("--miles", dest="host", action="store_const", const="miles", help="the host is Miles")
    lacks = "the host is slime: says what it lacks"
    hosts.add_argument("--slime", dest="host", action="store_const", const="slime", help=lacks)
    parser.add_argument("--env", action="store_true", help="print KEY=VALUE of the environment instead")
    add_contract_arguments(parser)
    parser.set_defaults(run=run)


RANKS: dict[str, Any] = {"type": whole, "metavar": "RANKS"}
# The arguments that `contract_of` reads; each is None where a user does not give it.
CONTRACT_ARGUMENTS: dict[str, dict[str, Any]] = {
    "--model": {"help": f"one of {', '.join(gpu.MODELS)}, or as Hugging Face names it (default: qwen3-4B)"},
    "--backend": {"choices": get_args(gpu.TrainBackend), "help": "what trains (default: megatron)"},
    "--tp": {**RANKS, "help": "tensor-parallel ranks of the trainer (default: the fewest that hold)"},
    "--cp": {**RANKS, "help": "context-parallel ranks of the trainer (default: 1)"},
    "--engine-tp": {**RANKS, "help": "ranks of the engine (default: --tp times --cp)"},
    "--gemm": {"choices": get_args(GemmName), "help": "matrix products of the engine (default: the trainer's)"},
}


OURS = {"trainer_tp": "--tp", "engine_tp": "--engine-tp", "context_parallel": "--cp"}
OF_MILES = {
    **{"trainer_tp": "--tensor-model-parallel-size", "engine_tp": "--rollout-num-gpus-per-engine"},
    "context_parallel": "--context-parallel-size",
}


def add_contract_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, settings in CONTRACT_ARGUMENTS.items():
        parser.add_argument(flag, **settings)


def run(arguments: argparse.Namespace) -> int:
    contract = contract_of(arguments)
    flags = launch_flags(contract)
    if lacking := [release for release in RELEASES if release.owner == arguments.host and release.lacks]:
        lacks = "; ".join(f"{release.name} has no {', '.join(release.lacks)}" for release in lacking)
        raise ContractError(f"--{arguments.host}: {lacks}. Launch with --miles")
    by_owner = {flag.owner: [each.name for each in flags if each.owner == flag.owner] for flag in flags}
    if absent := [owner for owner, names in by_owner.items() if not check_installed(owner, names)]:
        print(f"not installed here, so their flags were not checked: {', '.join(absent)}", file=sys.stderr)
    lines = [f"{name}={value}" for name, value in contract.environment.items()]
    lines = lines if arguments.env else [word for flag in flags for word in flag.words]
    print("\n".join(lines))
    if contract.backend == "fsdp":
        print(
            f'pins in the trainer: Ray, by --runtime-env-json \'{{"worker_process_setup_hook": "{HOOK}", ...}}\'; '
            "Miles itself switches SGLang's mode on and no more",
            file=sys.stderr,
        )
    return 0


def contract_of(arguments: argparse.Namespace) -> GpuContract:
    """Build the contract that the command line asks for; raises ContractError where no host can keep it."""
    model = "qwen3-4B" if arguments.model is None else arguments.model
    backend = arguments.backend or "megatron"
    host_contract(gpu.GPU_FAMILIES[gpu.family_and_size(model)[0]])
    for flag, ranks in (("--tp", arguments.tp), ("--cp", arguments.cp), ("--engine-tp", arguments.engine_tp)):
        if ranks is not None and ranks < 1:
            raise ContractError(f"{flag}: got {ranks}; a side has 1 rank or more")
    context = arguments.cp or 1
    shared = context if backend == "megatron" else 1
    tensor = gpu.fewest_ranks(model, backend, shared) // shared if arguments.tp is None else arguments.tp
    engine = tensor * shared if arguments.engine_tp is None else arguments.engine_tp
    gemm = arguments.gemm or TRAINER_GEMMS[backend]
    layout = {"trainer_tp": tensor, "engine_tp": engine, "context_parallel": context}
    try:
        return gpu.model_contract(model, backend, **layout, engine_gemm=gemm)
    except ContractError as error:
        raise error.spelled(OURS) from error


logger = logging.getLogger("true_on_policy")


def groups(args: Any) -> Iterator[tuple[str, argparse.Namespace]]:
    """Yield (place in the file, arguments) for each group of engines that samples from the trained model.

    The arguments are the host's, overridden by the group's settings.

    Miles v0.1.0 and main (31f1ca96) read the file in backends/sglang_utils/sglang_config.py. A file that this machine
    does not have cannot be read: a warning says so, and the check goes on.
    """
    path = getattr(args, "sglang_config", None)
    if path is None:
        return
    try:
        stated = parsed(text_of(path))
        sampling = [
            (f"{path}, model {shown(model['name'])}, group {number}", _arguments(args, model, group))
            for model in stated["sglang"]
            if model["name"] != "eval"
            for number, group in enumerate(model.get("server_groups") or model.get("engine_groups") or ())
            if group["worker_type"] != "placeholder" and _is_trained(args, model, group)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = cut(repr(error), 200)
        logger.warning("sglang_config: %s cannot be read here (%s): the groups are not checked", path, why)
        return
    yield from sampling


def _is_trained(args: Any, model: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Whether the engines of a model's group get the trainer's weights; a group may override the model's path."""
    path = (group.get("overrides") or {}).get("model_path", model.get("model_path") or args.hf_checkpoint)
    updated = model.get("update_weights")
    return path == args.hf_checkpoint if updated is None else updated


def _arguments(args: Any, model: Mapping[str, Any], group: Mapping[str, Any]) -> argparse.Namespace:
    own = group.get("overrides") or {}
    ranks = [own.get("tp_size"), group.get("num_gpus_per_engine"), model.get("num_gpus_per_engine")]
    stated = {f"sglang_{name}": value for name, value in own.items()}
    engine = next(filter(None, ranks), args.rollout_num_gpus_per_engine)
    return argparse.Namespace(**dict(view(args)) | stated | {"rollout_num_gpus_per_engine": engine})
