"""Observe what is in force in this process, by a probe or a getter; values of the configuration are marked.

`observe.dumps` writes the observation to a file for the doctor.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mis_plugins.config.view import original, view
from mis_plugins.hosts.adapters.miles import NEEDS as MILES
from mis_plugins.shared.provenance import installed
from true_on_policy.contract.gpu import GpuContract
from true_on_policy.contract.settings import CHOSEN, FUSED, OF_HOST, VERSIONS, Setting
from true_on_policy.errors import NotSeenError, PinError
from true_on_policy.kernels import gpu, megatron, precision
from true_on_policy.kernels.probes import Failure, digest
from true_on_policy.kernels.provider import device, findable

ABSENT = "absent"
KERNELS = "kernels at the model's shapes"
PRODUCTS = "products of trainer and engine"
COMPILES = "torch.compile"
ALL = "*"  # in `unseen`: no row of this side could be observed


@dataclass(frozen=True)
class Observation:
    """An observation says what one side runs.

    settings: the value of each row, by the row's name.
    unseen: why a row could not be observed, by the row's name.
    configured: rows whose value was read from an argument or a variable, and not seen at work.
    split: rows in which the processes of this side differ.
    """

    settings: Mapping[str, str]
    unseen: Mapping[str, str]
    configured: tuple[str, ...] = ()
    split: tuple[str, ...] = ()

    def why(self, name: str) -> str:
        """Return the reason why the row `name` is not among the settings."""
        return self.unseen.get(name) or self.unseen.get(ALL) or "not stated"

    def how(self, name: str) -> str:
        """Return how a row's value was found: `observed` or `configured`; empty where the row was not seen."""
        if name not in self.settings:
            return ""
        return "configured" if name in self.configured else "observed"


Look = Callable[[], str]  # returns the value of one row, or raises where the row cannot be observed


def observe(contract: GpuContract, args: Any = None) -> Observation:
    """Observe this process, the trainer's or one that pinned its contract; without a host `args` is None."""
    of_contract: dict[str, Look] = {
        KERNELS: lambda: first_failure(gpu.failures(contract), "batch-invariant"),
        PRODUCTS: lambda: _products(contract),
    }
    settings, unseen = looked(LOOKS | of_contract)
    configured = {name: os.environ.get(name, "unset") for name in contract.environment}
    if torch.cuda.is_available():
        settings |= gpu.observe(contract)
    if args is not None:
        configured |= of_host(args) | fused_of_host(args)
        strict = torch.are_deterministic_algorithms_enabled()
        settings |= {"deterministic algorithms": "on" if strict else "off"} | _parallel()
        settings |= looked({"log-softmax": lambda: _log_softmax(args)})[0]
    return Observation(configured | settings, unseen, tuple(configured.keys() - settings.keys()))


def looked(looks: Mapping[str, Look]) -> tuple[dict[str, str], dict[str, str]]:
    """Call each look; return the values seen, and why others were not: an exception leaves its own row unseen."""
    settings, unseen = {}, {}
    for name, look in looks.items():
        try:
            settings[name] = look()
        except NotSeenError as error:
            unseen[name] = str(error).removeprefix("not seen: ")
        except Exception as error:
            unseen[name] = f"{type(error).__name__}: {error}"
    return settings, unseen


def of_host(args: Any) -> dict[str, str]:
    """Read from a host's parsed arguments the rows that they decide."""
    stated = view(args)
    rows = {row: stated[name] for row, name in OF_HOST.items() if name in stated}
    texts = {row: f"{value:g}" if isinstance(value, float) else str(value) for row, value in rows.items()}
    seeded = stated.get("sglang_enable_deterministic_inference")
    return texts | {
        "seeds of a prompt's samples": "one each" if seeded else "not sent",
        "log-probs come from": "prefill" if stated.get("recompute_logprobs_via_prefill") else "decode",
        "log-softmax": "bf16" if stated.get("true_on_policy_mode") else "fp32",
    }


def _products(contract: GpuContract) -> str:
    """Digest the products of this model: an engine that multiplies alike has an equal digest.

    Megatron adds up o and down over its ranks by its own function; FSDP has one rank and runs aten's product.
    """
    if contract.size is None:
        raise NotSeenError("the contract knows no sizes")
    where = device()
    row_parallel = megatron.row_parallel() if contract.mode == "megatron" else F.linear
    return digest(contract.dtype, gpu.products(contract.size, row_parallel, row_parallel), where)


def first_failure(failures: Iterator[Failure], otherwise: str) -> str:
    """Return the text of the first failure or of a PinError; `otherwise` where no probe fails."""
    try:
        failure = next(failures, None)
    except PinError as error:
        return str(error)
    return otherwise if failure is None else str(failure)


def _compiles() -> str:
    """Try whether torch.compile really compiles here: `on` where it calls a backend of ours, else `off`."""
    graphs = []

    def spy(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=spy)(torch.zeros(1))
    return "on" if graphs else "off"


def _apex() -> str:
    """Tell whether the installed apex is NVIDIA's, or the unrelated toolkit of this name in the package index."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return ABSENT
    folders = map(Path, spec.submodule_search_locations or ())
    nvidia = any((folder / "normalization").exists() for folder in folders)
    return "NVIDIA's" if nvidia else "the index's apex, a web toolkit"


def _parallel() -> dict[str, str]:
    """Count the ranks of Megatron's groups; no rows where this process has no groups."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    return {
        "tensor parallel": str(state.get_tensor_model_parallel_world_size()),
        "context parallel": str(state.get_context_parallel_world_size()),
    }


@torch.no_grad()
def _log_softmax(args: Any) -> str:
    """Name the dtypes that Miles's functions give to fp32 logits for the log-softmax, and to the log-probs.

    Miles scores a sequence with four tokens for each context-parallel rank. No rank waits for another, because its
    true-on-policy mode uses no process group.
    """
    parallel_state = MILES.parallel.loaded()
    if parallel_state is None or not args.true_on_policy_mode:
        raise NotSeenError("no trainer of Miles in its true-on-policy mode")
    length = 4 * parallel_state().cp.size
    ((logits, tokens),) = MILES.responses.get()(
        torch.zeros(1, 4, 8),
        args=original(args),
        unconcat_tokens=[torch.zeros(length, dtype=torch.int64)],
        total_lengths=[length],
        response_lengths=[length - 1],
        max_seq_lens=[length],
    )
    log_probs, _ = MILES.log_probs_and_entropy.get()(logits, tokens, None, true_on_policy=True)
    return " and ".join(sorted({_SHORT[logits.dtype], _SHORT[log_probs.dtype]}))


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _nccl() -> str:
    device()
    from torch.cuda import nccl  # its import loads NCCL

    return ".".join(map(str, nccl.version()))


# Kernels of Transformer Engine and NVIDIA's Apex that change bits in Megatron's trainer. A flag of the host asks for a
# kernel, and Megatron runs the kernel only where its library is installed: a row of the doctor says both.


def fused_of_host(args: Any) -> dict[str, str]:
    """Read the state of each fused kernel that the host's parsed arguments mention, by its row."""
    stated = view(args)
    # Megatron makes an enum's member of an attention backend.
    named = {name: getattr(value, "name", value) for name, value in stated.items()}
    return {kernel.name: _state(kernel, named[kernel.host]) for kernel in FUSED if kernel.host in named}


def _state(kernel: Setting, asked: Any) -> str:
    """Tell whether a kernel is on where the host's argument is `asked`."""
    if asked in kernel.off:
        return "off"
    if not findable(kernel.module):
        return f"off, no {kernel.module}"
    return "on" if kernel.module in sys.modules else f"asked for, {kernel.module} not imported"


def chosen(module: str, name: str) -> str:
    """Tell what a module of Megatron-core chose: a class and its library, or whether it found a kernel."""
    choice = getattr(sys.modules.get(module), name, None)
    if choice is None:
        return "not imported"
    if isinstance(choice, bool):
        return "found" if choice else "absent"
    return f"{choice.__name__} of {choice.__module__.partition('.')[0]}"


# The look of each row of the doctor; a NotSeenError says why the row could not be observed.
LOOKS: dict[str, Look] = {
    "device": lambda: torch.cuda.get_device_name(device()),
    "torch": lambda: torch.__version__,
    "CUDA": lambda: str(torch.version.cuda),
    "NCCL": _nccl,
    **{row: lambda name=name: installed(name) or ABSENT for row, name in VERSIONS.items()},
    "Apex": _apex,
    **{row: partial(chosen, *place) for row, place in CHOSEN.items()},
    "TF32": lambda: "off" if next(precision.probe(device()), None) is None else "on",
    COMPILES: _compiles,
}
