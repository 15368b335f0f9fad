"""The model that Miles's FSDP trainer builds on a CPU, on a stand-in of its module: the bits of the proof's trainer."""

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stand_ins import Write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lab.in_host import cpu_trainer, fsdp_trainer
from true_on_policy import fsdp_worker
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import agreed_order
from true_on_policy.errors import ContractError
from true_on_policy.kernels.pin import pinned
from true_on_policy.models import hf_decoder, tiny
from true_on_policy.trainers import hf

FILE = "miles/backends/fsdp_utils/actor.py"
ACTOR = """
class FSDPTrainRayActor:
    def init(self, args):
        self._enable_true_on_policy_optimizations(args)

    def _enable_true_on_policy_optimizations(self, args):
        pass
"""


REGISTRY = """
from collections import namedtuple

ModelInstancePatchHook = namedtuple("ModelInstancePatchHook", "name applies_to apply")
HOOKS = []
register_model_instance_patch = HOOKS.append
"""
LENGTHS = (13, 29, 7, 15)


def packed(model: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The logits of sequences that lie end to end in one row, as Miles calls its model."""
    places = torch.cat([torch.arange(len(part)) for part in parts])[None]
    logits = model(input_ids=torch.cat(parts)[None], position_ids=places, attention_mask=None).logits[0]
    return list(logits.split([len(part) for part in parts]))


@pytest.mark.parametrize(("dtype", "order"), [("fp32", "engine"), ("bf16", "engine"), ("bf16", "trainer")])
def test_the_model_that_miles_builds_on_a_cpu_is_that_of_the_proof(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, order: Any
) -> None:
    """Sharded and packed, each sequence has the bits of the `hf` trainer, which scores each sequence alone."""
    contract = Contract(dtype=dtype, norm_order=order)
    write({FILE: ACTOR, f"{fsdp_trainer.REGISTRY.replace('.', '/')}.py": REGISTRY})
    monkeypatch.setattr(cpu_trainer, "start", lambda args: contract)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # where the watch takes its place
    fsdp_trainer.watch()
    actor = import_module(fsdp_worker.MODULE).FSDPTrainRayActor()
    actor.precision_policy = Namespace(param_dtype=torch.bfloat16, sync_dtype_resolver=None)
    actor.init(Namespace(deterministic_mode=False))
    policy, [hook] = actor.precision_policy, import_module(fsdp_trainer.REGISTRY).HOOKS
    assert policy.param_dtype == policy.sync_dtype_resolver("weight", torch.float16) == DTYPES[contract.dtype]
    tiny.checkpoint("tiny-qwen3", tmp_path, torch.bfloat16, 0)
    model = hf_decoder.load(tmp_path, "bf16").float()
    assert hook.applies_to(None, None)
    hook.apply(model)
    model = sharded(model.train(), policy.param_dtype)
    drawn = torch.Generator().manual_seed(0)
    parts = [torch.randint(model.config.vocab_size, (length,), generator=drawn) for length in LENGTHS]
    trainer = hf.HuggingFace(tmp_path, dtype, agreed_order(contract, "sglang", "hf"))
    with pinned(contract), torch.no_grad():
        expected = [trainer.logits([part.tolist()])[0] for part in parts]
        assert all(map(equal_bits, packed(model, parts), expected))


def sharded(model: Any, dtype: torch.dtype) -> Any:
    """Shard a model as Miles does: each layer that transformers names, and then the rest."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    options: Any = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def test_a_registry_that_is_gone_is_refused(write: Write) -> None:
    write({f"{fsdp_trainer.REGISTRY.replace('.', '/')}.py": ""})
    with pytest.raises(ContractError, match="has no register_model_instance_patch"):
        fsdp_trainer.align(Namespace(precision_policy=Namespace()), Contract())
