"""The bends: changes of modules that let a host run on a machine without a GPU, one record each.

A record quotes the lines of the host that need the bend. `changed` reads the quoted lines in the checkouts
before a run, and a line that is no longer there stops the run: the bend may be wrong now, or needless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Line:
    """A line of source: the tree that holds the file, the path inside it, the number and the stripped text."""

    tree: str
    path: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.tree}: {self.path}:{self.number}"


def _unchanged(module: ModuleType) -> None:
    """Change nothing: the bend only serves names that are missing."""


@dataclass(frozen=True)
class Bend:
    """One bend of the machine.

    Attributes:
        why: what the lines do that a CPU cannot.
        wanted_by: the lines that need the bend.
        module: the module whose import applies `change`.
        serves: modules that are served where they are missing, with the names `stand_ins`.
    """

    why: str
    wanted_by: tuple[Line, ...]
    module: str
    change: Callable[[ModuleType], None] = _unchanged
    serves: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = field(default=())


def changed(trees: Mapping[str, Path], bends: Iterable[Bend] | None = None) -> list[str]:
    """Name the quoted lines that the given trees no longer hold where they were."""
    lines = [line for bend in (BENDS if bends is None else bends) for line in bend.wanted_by]
    return [f"{line}: reads {found!r}, not {line.text!r}" for line in lines
            if line.tree in trees and (found := _read(trees[line.tree], line)) != line.text]  # fmt: skip


def _read(tree: Path, line: Line) -> str | None:
    try:
        rows = (tree / line.path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return rows[line.number - 1].strip() if line.number <= len(rows) else None


def _gloo(module: Any) -> None:
    """Make every process group use gloo, whatever backend is named."""
    make = module._new_process_group_helper

    def over_gloo(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {name: None for name in ("backend_options", "pg_options", "device_id") if name in kwargs}
        return make(size, rank, ranks, "gloo", *args, **kwargs)

    start = module.init_process_group

    def without_device(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        start(*args, **kwargs)

    module._new_process_group_helper = over_gloo
    module.init_process_group = without_device


def _named(*names: str) -> Callable[[ModuleType], None]:
    """Build a change that gives a module empty classes of these names, where it lacks them."""

    def change(module: ModuleType) -> None:
        for name in names:
            if not hasattr(module, name):
                setattr(module, name, type(name, (), {}))

    return change


def _fields_of_structs(module: ModuleType) -> None:
    """Let `dataclasses.fields` answer for SGLang's arguments, which are a msgspec Struct."""
    import dataclasses

    fields = dataclasses.fields

    def of_either(kind: Any) -> Any:
        names = getattr(kind, "__struct_fields__", None)
        return fields(kind) if names is None else [_Name(name) for name in names]

    dataclasses.fields = of_either


@dataclass(frozen=True)
class _Name:
    name: str


def _fake_gpu(module: ModuleType) -> None:
    from lab.in_host import fake_gpu

    fake_gpu.install(module)


def _mesh_of_cpus(module: Any) -> None:
    """Make every device mesh a mesh of CPUs."""
    make = module.init_device_mesh
    module.init_device_mesh = lambda device_type, *args, **kwargs: make("cpu", *args, **kwargs)


def _one_generator(module: ModuleType) -> None:
    from lab.in_host import fake_gpu

    fake_gpu.share_the_generator(module)


def _numpy_one(module: Any) -> None:
    """Show numpy to one module under a version that it accepts."""
    module.np = _NumpyOne(module.np)


class _NumpyOne:
    __version__ = "1.26"

    def __init__(self, numpy: ModuleType):
        self._numpy = numpy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numpy, name)


def _patient(module: Any) -> None:
    """Wait for the router as long as a loaded machine takes to import it."""
    wait = module.wait_for_server_ready
    module.wait_for_server_ready = lambda *args, timeout, **kwargs: wait(*args, timeout=ROUTER_S, **kwargs)


RENAMED = (
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
)


def _forwards_new_names(module: Any) -> None:
    """Let the host's group forward collectives by the names that torch 2.13 gave them, to the group inside."""
    for name in RENAMED:
        setattr(module.ReloadableProcessGroup, name, _forwarded(name))


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._fwd(name, *args, **kwargs)


def _cpu_accelerator(module: Any) -> None:
    """Make slime's accelerator available in every process, with the CPU as its device."""
    import torch

    kind = module.CUDAAccelerator
    kind.is_available = lambda self: True
    kind.current_device = lambda self: torch.device("cpu")
    kind.device_name = lambda self, index=None: "cpu"


def _cuda_is_there(module: Any) -> None:
    module._cuda_available = lambda: True


def _asked_for_routes(module: Any) -> None:
    """Let an engine that keeps routes return them with every request."""
    generate = module.TokenizerManager.generate_request

    def with_routes(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self.server_args.enable_return_routed_experts and hasattr(request, "return_routed_experts"):
            request.return_routed_experts = True
        return generate(self, request, *args, **kwargs)

    module.TokenizerManager.generate_request = with_routes


def _plain_memory(module: Any) -> None:
    """Allocate host memory without registering the memory with CUDA."""
    import torch

    def allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _without_a_gpu_s_name(module: Any) -> None:
    """Keep torch's own handles of tensors, which name no GPU for a tensor on the CPU."""
    module.monkey_patch_torch_reductions = lambda: None


def _by_name(module: ModuleType) -> None:
    """Share tensors by the name of their shared memory, which any process of this machine can open."""
    import torch

    torch.multiprocessing.set_sharing_strategy("file_system")


ROUTER_S = 600
DIRECT = "backends/megatron_utils/update_weight/hf_weight_iterator_direct.py"
FROM_TENSOR = "backends/megatron_utils/update_weight/update_weight_from_tensor.py"
SERIALIZED = (
    "serialized_tensors.append(MultiprocessingSerializer.serialize(flattened_tensor_data, output_str=True))"
)
UPDATES = "miles/backends/megatron_utils/update_weight/update_weight_from_distributed/"

BENDS: tuple[Bend, ...] = (
    Bend(
        "SGLang 0.5.16 had this module, 0.5.23 does not; only models of DeepSeek call it",
        (Line("miles", "miles/utils/chat_template_utils/deepseek.py", 19,
              "from sglang.srt.entrypoints.openai import encoding_dsv4"),),
        "sglang.srt.entrypoints.openai",
        serves=("sglang.srt.entrypoints.openai.encoding_dsv4",),
    ),
    Bend(
        "weights sent from memory to memory, which a CPU does not do, import names that SGLang 0.5.23 lacks",
        (Line("miles", UPDATES + "p2p.py", 12,
              "from sglang.srt.distributed.parallel_state import ParallelismContext, RankParallelismConfig"),),
        "sglang.srt.distributed.parallel_state",
        _named("ParallelismContext", "RankParallelismConfig"),
    ),
    Bend(
        "weights sent from memory to memory import a module that SGLang 0.5.23 lacks",
        (Line("miles", UPDATES + "p2p.py", 17,
              "from sglang.srt.model_loader.parameter_mapper import ParameterMapper"),),
        "sglang.srt.model_loader",
        serves=("sglang.srt.model_loader.parameter_mapper",),
        stand_ins=("ParameterMapper",),
    ),
    Bend(
        "weights sent from memory to memory import Mooncake, which is not needed on a CPU",
        (Line("miles", UPDATES + "p2p_transfer_utils.py", 11, "from mooncake.engine import TransferEngine"),),
        "mooncake.engine",
        serves=("mooncake", "mooncake.engine"),
        stand_ins=("TransferEngine",),
    ),
    Bend(
        "SGLang's arguments are no dataclass any more",
        (Line("miles", "miles/backends/sglang_utils/sglang_engine.py", 806,
              "for attr in dataclasses.fields(ServerArgs):"),
         Line("slime", "slime/backends/sglang_utils/sglang_engine.py", 575,
              "server_arg_fields = dataclasses.fields(ServerArgs)")),
        "sglang.srt.server_args",
        _fields_of_structs,
    ),
    Bend(
        "process groups of trainers, and the group that carries weights to the engine, are of NCCL",
        (Line("miles", "miles/ray/train_actor.py", 109, "dist.init_process_group("),
         Line("slime", "slime/ray/train_actor.py", 65, "dist.init_process_group(")),
        "torch.distributed.distributed_c10d",
        _gloo,
    ),
    Bend(
        "a trainer takes a GPU for granted",
        (Line("miles", "miles/ray/train_actor.py", 95, 'torch.cuda.set_device(f"cuda:{local_rank}")'),),
        "megatron.core",
        _fake_gpu,
    ),
    Bend(
        "a trainer on FSDP takes a GPU for granted, and imports Megatron's core only at its first log-prob",
        (Line("miles", "miles/ray/train_actor.py", 95, 'torch.cuda.set_device(f"cuda:{local_rank}")'),),
        "miles.backends.fsdp_utils.actor",
        _fake_gpu,
    ),
    Bend(
        "FSDP spreads its parameters over a mesh of GPUs",
        (Line("miles", "miles/backends/fsdp_utils/parallel.py", 52, 'device_type="cuda",'),),
        "torch.distributed.device_mesh",
        _mesh_of_cpus,
    ),
    Bend(
        "Megatron keeps random states of the GPU",
        (Line("megatron-miles", "megatron/core/tensor_parallel/random.py", 55,
              "return torch.cuda.random.get_rng_state(device=device)"),
         Line("megatron-slime", "megatron/core/tensor_parallel/random.py", 55,
              "return torch.cuda.random.get_rng_state(device=device)")),
        "megatron.core.tensor_parallel.random",
        _one_generator,
    ),
    Bend(
        "slime looks for a GPU in every process that it starts, the engine's actor too",
        (Line("slime", "slime/utils/accelerator/__init__.py", 127,
              "return bool(torch.cuda.is_available() and torch.cuda.device_count() > 0)"),),
        "slime.utils.accelerator",
        _cuda_is_there,
    ),
    Bend(
        "slime's accelerator numbers its devices",
        (Line("slime", "slime/utils/accelerator/torch_accelerator.py", 46,
              "return int(self._module().current_device())"),
         Line("slime", "slime/utils/accelerator/cuda.py", 21,
              "return bool(torch.cuda.is_available() and torch.cuda.device_count() > 0)")),
        "slime.utils.accelerator.cuda",
        _cpu_accelerator,
    ),
    Bend(
        "slime asks for numpy 1, and SGLang for numpy 2",
        (Line("slime", "slime/backends/megatron_utils/initialize.py", 66,
              'assert np.__version__.startswith("1."), "Megatron does not support numpy 2.x"'),),
        "slime.backends.megatron_utils.initialize",
        _numpy_one,
    ),
    Bend(
        "Miles gives its router 30 s, and a loaded machine takes longer to import it",
        (Line("miles", "miles/ray/rollout/router_manager.py", 75,
              "wait_for_server_ready(router_ip, router_port, process, timeout=30)"),),
        "miles.ray.rollout.router_manager",
        _patient,
    ),
    Bend(
        "torch 2.13 renamed collectives, which the host's group of its own forwards by their names of before",
        (Line("miles", "miles/utils/reloadable_process_group.py", 219, "def _reduce_scatter_base(self, *a, **kw):"),),
        "miles.utils.reloadable_process_group",
        _forwards_new_names,
    ),
    Bend(
        "torch 2.13 renamed collectives, which the host's group of its own forwards by their names of before",
        (Line("slime", "slime/utils/reloadable_process_group.py", 423, "def _reduce_scatter_base(self, *a, **kw):"),),
        "slime.utils.reloadable_process_group",
        _forwards_new_names,
    ),
    Bend(
        "SGLang keeps the routes that it returns in memory which it registers with CUDA (state_capturer/base.py)",
        (Line("miles", "miles/backends/sglang_utils/sglang_engine.py", 758,
              'kwargs["enable_return_routed_experts"] = True'),
         Line("slime", "slime/backends/sglang_utils/sglang_engine.py", 570,
              'kwargs["enable_return_routed_experts"] = True')),
        "sglang.srt.mem_cache.pool_host.common",
        _plain_memory,
    ),
    Bend(
        "sglang-router 0.3.2 of PyPI drops the word of a request that asks for routes; Miles has a router of its own",
        (Line("slime", "slime/rollout/sglang_rollout.py", 182, 'payload["return_routed_experts"] = True'),),
        "sglang.srt.managers.tokenizer_manager",
        _asked_for_routes,
    ),
    Bend(
        "SGLang has torch's handles of tensors name a GPU, which those of a CPU's tensors have no place for",
        (Line("miles", f"miles/{DIRECT}", 66, "monkey_patch_torch_reductions()"),
         Line("slime", f"slime/{DIRECT}", 74, "monkey_patch_torch_reductions()")),
        "sglang.srt.utils.patch_torch",
        _without_a_gpu_s_name,
    ),
    Bend(
        "a colocated trainer hands on handles of GPU memory; torch opens those of a CPU's memory to children alone",
        (Line("miles", f"miles/{FROM_TENSOR}", 496, SERIALIZED),),
        "miles.backends.megatron_utils.update_weight.update_weight_from_tensor",
        _by_name,
    ),
    Bend(
        "a colocated trainer hands on handles of GPU memory; torch opens those of a CPU's memory to children alone",
        (Line("slime", f"slime/{FROM_TENSOR}", 389, SERIALIZED),),
        "slime.backends.megatron_utils.update_weight.update_weight_from_tensor",
        _by_name,
    ),
)  # fmt: skip
