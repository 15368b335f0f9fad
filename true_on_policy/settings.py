"""What is in force in this process: seen by a probe, a getter or the host's arguments, never assumed.

A trainer writes its side with `dump` once it is pinned; `python -m true_on_policy doctor --trainer-dump FILE` reads it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from true_on_policy.errors import NotSeenError, PinError, TrueOnPolicyError
from true_on_policy.gpu_contract import GpuContract, Size, gpu_contract
from true_on_policy.kernels import gpu, precision
from true_on_policy.kernels.provider import device
from true_on_policy.probes import Failure

FORMAT = 1
ABSENT = "absent"
KERNELS = "kernels at the model's shapes"
PRODUCTS = "products of trainer and engine"
COMPILES = "torch.compile"
ALL = "*"  # in `unseen`: nothing of this side could be looked at

# Rows of the doctor, and the distribution that tells its version.
VERSIONS = {
    "Megatron-core": "megatron-core",
    "SGLang": "sglang",
    "Transformer Engine": "transformer-engine",
    "Triton": "triton",
    "transformers": "transformers",
}


class DumpError(TrueOnPolicyError):
    """A file that `dump` did not write."""


@dataclass(frozen=True)
class Observation:
    """What one side runs.

    Attributes:
        settings: value by the name of a row.
        unseen: why a row could not be looked at.
    """

    settings: Mapping[str, str]
    unseen: Mapping[str, str]

    def why(self, name: str) -> str:
        """Why `name` is not among the settings."""
        return self.unseen.get(name) or self.unseen.get(ALL) or "not stated"


def observe(contract: GpuContract, args: argparse.Namespace | None = None) -> Observation:
    """This process, which is the trainer's, or one that pinned what the trainer would; `args`: the host's own."""
    settings, unseen = {}, {}
    for name, look in LOOKS.items():
        try:
            settings[name] = look(contract)
        except NotSeenError as error:
            unseen[name] = str(error).removeprefix("not seen: ")
    settings |= {name: os.environ.get(name, "unset") for name in contract.environment}
    if torch.cuda.is_available():
        settings |= gpu.observe(contract)
    if args is not None:
        settings |= of_host(args) | {"deterministic algorithms": _deterministic()}
    return Observation(settings, unseen)


def dump(path: Path, contract: GpuContract, args: argparse.Namespace | None = None) -> None:
    """Write this process's side to `path`, whose folder is made: for a host's init hook, once it has pinned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stated = asdict(contract) | {"family": contract.family.name}
    seen = asdict(observe(contract, args))
    path.write_text(json.dumps({"format": FORMAT, "contract": stated, **seen}, indent=2) + "\n")


def load(path: Path) -> tuple[GpuContract, Observation]:
    """What `dump` wrote.

    Raises:
        DumpError: it is something else.
        ContractError: its contract cannot hold.
    """
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        if stated["format"] != FORMAT:
            raise DumpError(f"{path}: format {stated['format']}, this version reads {FORMAT}")
        agreed = dict(stated["contract"])
        seen = Observation(dict(stated["settings"]), dict(stated["unseen"]))
        size = Size(**agreed.pop("size")) if agreed["size"] else agreed.pop("size")
        names = agreed.pop("family"), agreed.pop("backend")
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"{path}: not written by true_on_policy.settings.dump ({error!r})") from error
    return gpu_contract(*names, size=size, **agreed), seen


def of_host(args: argparse.Namespace) -> dict[str, str]:
    """What a host's parsed arguments decide."""
    stated = {name: getattr(args, name) for name in vars(args)}
    rows = {row: stated[name] for row, name in _HOST_ROWS.items() if name in stated}
    seeded = stated.get("sglang_enable_deterministic_inference")
    return {row: _text(value) for row, value in rows.items()} | {
        "seeds of a prompt's samples": "one each" if seeded else "not sent",
        "log-probs come from": "prefill" if stated.get("recompute_logprobs_via_prefill") else "decode",
        "log-softmax": "bf16" if stated.get("true_on_policy_mode") else "fp32",
    }


_HOST_ROWS = {
    "contract": "sglang_true_on_policy_contract",
    "tensor parallel": "tensor_model_parallel_size",
    "context parallel": "context_parallel_size",
    "temperature": "rollout_temperature",
    "top-p": "rollout_top_p",
    "top-k": "rollout_top_k",
}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _device(contract: GpuContract) -> str:
    device()
    return torch.cuda.get_device_name()


def _kernels(contract: GpuContract) -> str:
    """Whether the kernels that run here are batch-invariant at the model's shapes."""
    device()
    return _found(gpu.failures(contract), "batch-invariant")


def _products(contract: GpuContract) -> str:
    """Whether the engine's product gives the trainer's bits."""
    if contract.engine_gemm == contract.trainer_gemm:
        return "one kernel"
    device()
    return _found(gpu.disagreements(contract), "equal")


def _found(failures: Iterator[Failure], otherwise: str) -> str:
    try:
        failure = next(failures, None)
    except PinError as error:
        return str(error)
    return otherwise if failure is None else str(failure)


def _tf32(contract: GpuContract) -> str:
    """Whether float32 products lose their last bits."""
    return "off" if next(precision.probe(device()), None) is None else "on"


def _compiles(contract: GpuContract) -> str:
    """Whether torch.compile really compiles here: a backend of ours is called, or it is not."""
    graphs = []

    def spy(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=spy)(torch.zeros(1))
    return "on" if graphs else "off"


def _apex(contract: GpuContract) -> str:
    """NVIDIA's, or the unrelated toolkit that the package index calls apex."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return ABSENT
    folders = map(Path, spec.submodule_search_locations or ())
    nvidia = any((folder / "normalization").exists() for folder in folders)
    return "NVIDIA's" if nvidia else "the index's apex, a web toolkit"


def _local_norm(contract: GpuContract) -> str:
    """Which norm Megatron's local spec takes: NVIDIA Apex's where it could import it."""
    specs = sys.modules.get("megatron.core.models.gpt.gpt_layer_specs")
    return getattr(getattr(specs, "LNImpl", None), "__name__", "not imported")


def _version(distribution: str) -> Callable[[GpuContract], str]:
    def look(contract: GpuContract) -> str:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return ABSENT

    return look


def _deterministic() -> str:
    return "on" if torch.are_deterministic_algorithms_enabled() else "off"


def _nccl(contract: GpuContract) -> str:
    device()
    from torch.cuda import nccl  # its import loads NCCL

    return ".".join(map(str, nccl.version()))


# Row of the doctor and how to look; NotSeenError says why one could not.
LOOKS: dict[str, Callable[[GpuContract], str]] = {
    "device": _device,
    "torch": lambda contract: torch.__version__,
    "CUDA": lambda contract: str(torch.version.cuda),
    "NCCL": _nccl,
    **{row: _version(distribution) for row, distribution in VERSIONS.items()},
    "Apex": _apex,
    "norm of the local spec": _local_norm,
    KERNELS: _kernels,
    PRODUCTS: _products,
    "TF32": _tf32,
    COMPILES: _compiles,
}
