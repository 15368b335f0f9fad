"""The bends: changes of modules that let a host run on a machine without a GPU, one record each.

A record of `bends.yaml` quotes the lines of the host that need the bend. `changed` reads the quoted lines in the
checkouts before a run, and a line that is no longer there stops the run: the bend may be wrong now, or needless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml


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

    why: what the lines do that a CPU cannot.
    wanted_by: the lines that need the bend.
    module: the module whose import applies `change`; `classes` names empty ones that the module shall have.
    serves: modules that are served where they are missing, with the names `stand_ins`.
    """

    why: str
    wanted_by: tuple[Line, ...]
    module: str
    change: Callable[[ModuleType], None] = _unchanged
    serves: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()


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
        return fields(kind) if names is None else [SimpleNamespace(name=name) for name in names]

    dataclasses.fields = of_either


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
FROM_TENSOR = "backends/megatron_utils/update_weight/update_weight_from_tensor.py"
CHANGES: dict[str, Callable[[ModuleType], None]] = {
    change.__name__.removeprefix("_"): change
    for change in (
        *(_unchanged, _gloo, _fields_of_structs, _fake_gpu, _mesh_of_cpus, _one_generator, _numpy_one),
        *(_patient, _forwards_new_names, _cpu_accelerator, _cuda_is_there, _asked_for_routes),
        *(_plain_memory, _without_a_gpu_s_name, _by_name),
    )
}
"""What a bend does to its module, by the names of `bends.yaml`."""


def _read_bend(row: Mapping[str, Any]) -> Bend:
    change = _named(*row["classes"]) if "classes" in row else CHANGES[row.get("change", "unchanged")]
    lines = tuple(Line(**line) for line in row["wanted_by"])
    served = (tuple(row.get(name, ())) for name in ("serves", "stand_ins"))
    return Bend(row["why"], lines, row["module"], change, *served)


BENDS = tuple(map(_read_bend, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))))
