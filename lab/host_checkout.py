"""Import a checkout of Miles or slime on a CPU-only machine; nothing of the checkout is copied or changed on disk.

Three steps make a checkout run on a CPU. Stand-ins replace packages of the rollout side and of tracking (ray, sglang,
httpx, psutil, wandb) where these are not installed. `torch.compile` is switched off: it costs minutes and changes no
result. Process groups come from Megatron over gloo.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import importlib
import importlib.abc
import importlib.machinery
import sys
import tempfile
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from lab.host_modules import HOSTS, Host
from lab.provenance import parser_of, target

NEVER_CALLED = ("ray", "sglang", "httpx", "psutil", "wandb")


class CannotCompare(RuntimeError):
    """The host could not be loaded or driven, so parity was not compared."""


class _StandIn(ModuleType):
    """A module that has every attribute, and that the loss never calls."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that is asked last, so that it sees only packages that are not installed."""

    def __init__(self, packages: Sequence[str]):
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for_missing_packages(packages: Sequence[str] = NEVER_CALLED) -> None:
    sys.meta_path.append(_StandInFinder(packages))


def build_parser(description: str | None) -> ArgumentParser:
    """Build the command line of a program that runs code of a host, whose checkout the user names."""
    parser = parser_of(description)
    parser.add_argument("--host", choices=sorted(HOSTS), required=True)
    parser.add_argument("--checkout", type=Path, required=True, help="root of a source checkout of the host")
    parser.add_argument("--json", type=target, help="write the figures here, and beside it a .md")
    return parser


def load_host(name: str, checkout: Path) -> Host:
    """Put the checkout on the path and import its loss.

    Raises:
        CannotCompare: the checkout lacks its package, or a module of it does not import.
    """
    host = HOSTS[name]
    if not (checkout / name).is_dir():
        raise CannotCompare(f"--checkout {checkout}: no package {name}/ in it; give the root of a {name} checkout")
    sys.path.insert(0, str(checkout.resolve()))
    stand_in_for_missing_packages()
    _keep_float32_gradients()
    try:
        importlib.import_module(host.loss_module)
        importlib.import_module(host.tis_path.rpartition(".")[0])
    except Exception as error:
        raise CannotCompare(f"{host.loss_module} of {checkout} does not import: {error!r}") from error
    return host


def _keep_float32_gradients() -> None:
    """Replace Megatron's fused cross-entropy, which Miles uses, by the unfused one.

    The fused function rounds the gradient of the logits to bfloat16 and hides differences; the unfused one computes in
    float32. The driver replaces no other function.
    """
    from megatron.core.fusions import fused_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, tokens, group: vocab_parallel_cross_entropy(
        logits, tokens
    )


def start_groups(host_name: str | None, context_parallel_size: int) -> None:
    """Build Megatron's groups over the initialized default group, and hand them to Miles as its ParallelState."""
    from megatron.core import mpu

    mpu.initialize_model_parallel(context_parallel_size=context_parallel_size)
    if host_name == "miles":
        _hand_groups_to_miles(mpu)


def _hand_groups_to_miles(mpu: Any) -> None:
    parallel = importlib.import_module("miles.backends.training_utils.parallel")

    def info(group: dist.ProcessGroup) -> Any:
        return parallel.GroupInfo(dist.get_rank(group), dist.get_world_size(group), group)

    dp, dp_cp = mpu.get_data_parallel_group(), mpu.get_data_parallel_group(with_context_parallel=True)
    tp, cp = mpu.get_tensor_model_parallel_group(), mpu.get_context_parallel_group()
    alone = parallel.GroupInfo(0, 1, None)
    parallel.set_parallel_state(
        parallel.ParallelState(
            intra_dp=info(dp), intra_dp_cp=info(dp_cp), cp=info(cp), tp=info(tp),
            pp=alone, ep=alone, etp=alone, indep_dp=alone,
        )
    )  # fmt: skip


def run_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` in `world_size` forked ranks of one gloo group, and return the results in rank order.

    The ranks are forked because importing Megatron anew takes ten seconds. `torch.save` carries the results back.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (world_size, folder, work), nprocs=world_size, start_method="fork")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, work: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(work(rank), f"{folder}/{rank}.pt")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    dist.barrier()
    os._exit(0)  # gloo's threads do not survive an ordinary interpreter shutdown after a fork
