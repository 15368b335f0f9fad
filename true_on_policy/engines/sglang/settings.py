"""Observe, inside SGLang's processes, what runs the model; HTTP does not report it.

Our plugin calls `written` in each process that runs the model, where TRUE_ON_POLICY_ENGINE_DUMP names a folder. The
probes run before the server is up, on SGLang's own kernels and beside its key-value cache.
"""

import copy
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import WHY, Size
from true_on_policy.contract.model_config import stated_size
from true_on_policy.engines.handover import FOLDER
from true_on_policy.errors import NotSeenError
from true_on_policy.kernels import deep_gemm, gpu, precision, sglang
from true_on_policy.kernels.probes import Product, aten_failures, digest, linear_once, over_ranks
from true_on_policy.kernels.provider import counted
from true_on_policy.observe.dumps import Dump, this_process
from true_on_policy.observe.dumps import write as write_dump
from true_on_policy.observe.process import KERNELS, LOOKS, PRODUCTS, Look, Observation, first_failure, looked

# After this method SGLang 0.5.17 to 0.5.23 have kernels, attention and cache in place, and no CUDA graph yet.
TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
SPLITS = "flash_attention: FA3 default num_splits"
MODE = "deep_gemm: DeepGEMM mode"
WIDE = (torch.bfloat16, torch.float16, torch.float32)

logger = logging.getLogger("true_on_policy")


def written(result: Any, runner: Any) -> None:
    """Write the dump in SGLang's hook; an engine that cannot be observed starts all the same, without a dump."""
    try:
        write(runner)
    except Exception:
        logger.exception("true_on_policy: nothing written for the doctor")


def write(runner: Any) -> Path:
    """Write the dump of this rank, named by the machine of the engine's first rank and the server's port."""
    args = runner.server_args
    process = this_process(f"http://{args.host}:{args.port}")
    machine = (args.dist_init_addr or "").rpartition(":")[0] or socket.gethostname()
    name = f"engine-{re.sub(r'[^A-Za-z0-9.-]', '_', machine)}-{args.port}.json"
    return write_dump(Path(os.environ[FOLDER]) / name, Dump(process, observe(runner), None))


def observe(runner: Any) -> Observation:
    """Observe the process of `runner`, SGLang's ModelRunner."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_world_size  # pyright: ignore[reportMissingImports]

    parameters = [*runner.model.parameters()]
    where, dtype = parameters[0].device, DTYPES[runner.model_config.dtype]
    size = stated_size(runner.model_config.hf_text_config.to_dict())
    ranks = get_tensor_model_parallel_world_size()
    narrow = {str(each.dtype).removeprefix("torch.") for each in parameters if each.dtype not in WIDE}
    own = Shapes.of(size, ranks)
    looks: dict[str, Look] = LOOKS | {
        "device": lambda: where.type,
        "TF32": lambda: first_failure(precision.probe(where), "off"),
        KERNELS: lambda: first_failure(aten_failures(dtype, own, where), "batch-invariant"),
        PRODUCTS: lambda: digest(dtype, _products(runner.model, size), where),
        "tensor parallel": lambda: str(ranks),
        "attention": lambda: " and ".join(sorted({_attention(each) for each in _backends(runner)})),
        SPLITS: lambda: ", ".join(sorted({_splits(each) for each in _backends(runner)})),
        "KV cache": lambda: str(runner.kv_cache_dtype).removeprefix("torch."),
        "quantization": lambda: ", ".join(sorted(narrow)) or "None",
        MODE: lambda: _deep_gemm_mode(dtype, own, where),
    }
    settings, unseen = looked(looks)
    settings |= precision.settings() | {f"sglang: {key}": value for key, value in sglang.settings().items()}
    variables = {name: os.environ.get(name, "unset") for name in WHY}
    return Observation(variables | settings, unseen, tuple(variables))


DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _products(model: torch.nn.Module, size: Size) -> Iterator[tuple[int, int, Product]]:
    """Yield the model's products; for o and down, SGLang's layers choose a kernel by ranks and contract."""
    return gpu.products(size, *(_row_parallel(_layer(model, name)) for name in ("o_proj", "down_proj")))


def _layer(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Find the first layer of this name in the model."""
    layer = next((layer for dotted, layer in model.named_modules() if dotted.rpartition(".")[2] == name), None)
    if layer is None:
        raise NotSeenError(f"{type(model).__name__} has no {name}")
    return layer


def _row_parallel(layer: Any) -> Product:
    """Build the product of an SGLang RowParallelLinear over its ranks, with given weights in place of the model's."""

    def share(x: Tensor, weight: Tensor) -> Tensor:
        twin = copy.copy(layer)
        twin._parameters = {**layer._parameters, "weight": Parameter(weight, requires_grad=False)}
        return twin(x, skip_all_reduce=True)[0]

    return over_ranks(share, layer.input_size // layer.input_size_per_partition)


def _backends(runner: Any) -> list[Any]:
    """List SGLang's attention backends: one for prefill and one for decode, or one for both."""
    backend = runner.attn_backend
    parts = [getattr(backend, f"{phase}_backend", None) for phase in ("prefill", "decode")]
    return [part for part in parts if part is not None] or [backend]


# SGLang's own names of its attention backends, by class.
ATTENTIONS: dict[str, Callable[[Any], str]] = {
    "FlashAttentionBackend": lambda backend: f"fa{backend.fa_impl_ver}",
    "FlashInferAttnBackend": lambda backend: "flashinfer",
    "TritonAttnBackend": lambda backend: "triton",
    "TorchNativeAttnBackend": lambda backend: "torch_native",
}


def _attention(backend: Any) -> str:
    name = type(backend).__name__
    return ATTENTIONS.get(name, lambda backend: name)(backend)


def _splits(backend: Any) -> str:
    """Read the number of splits from an attention backend."""
    splits = {getattr(backend, name, None) for name in ("num_splits", "decode_num_splits")} - {None}
    if not splits:
        raise NotSeenError(f"{type(backend).__name__} tells no num_splits")
    return ", ".join(sorted(map(str, splits)))


def _deep_gemm_mode(dtype: str, shapes: Shapes, where: torch.device) -> str:
    """Read DeepGEMM's mode while SGLang multiplies: since DeepGEMM 0.2, SGLang sets it only during a call."""
    library = sys.modules.get("deep_gemm")
    if library is None:
        raise NotSeenError("deep_gemm is not imported")
    with counted(library, "bf16_gemm_nn", lambda: deep_gemm.settings()["DeepGEMM mode"]) as modes:
        linear_once(dtype, shapes.linear[0], where)
    if not modes:
        raise NotSeenError("SGLang's product did not call deep_gemm")
    return ", ".join(sorted(set(modes)))
