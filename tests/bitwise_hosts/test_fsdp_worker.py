"""The pin of Miles's FSDP trainer, on a stand-in of its module: after Miles's own step, before its model, once."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import ran
from stand_ins import Write, write  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from true_on_policy import fsdp_worker
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.gpu import gpu_contract
from true_on_policy.contract.norm_order import agreed_order
from true_on_policy.errors import ContractError
from true_on_policy.flags.command import HOOK, launch_flags
from true_on_policy.hosts import fsdp_trainer, start
from true_on_policy.kernels.pin import pinned
from true_on_policy.models import hf_decoder, tiny
from true_on_policy.trainers import hf

FILE = "miles/backends/fsdp_utils/actor.py"
# As Miles's, with what it did written down.
ACTOR = """
class FSDPTrainRayActor:
    def init(self, args):
        self._enable_true_on_policy_optimizations(args)
        args.done.append("model")

    def _enable_true_on_policy_optimizations(self, args):
        args.done.append("sglang's mode")
"""


class Args:
    def __init__(self, deterministic_mode: bool = False):
        self.done: list[str] = []
        self.deterministic_mode = deterministic_mode


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(start, "start", lambda args: args.done.append("ours"))
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders


def trained() -> list[str]:
    args = Args()
    import_module(fsdp_worker.MODULE).FSDPTrainRayActor().init(args)
    return args.done


def test_it_follows_miless_own_step(write: Write) -> None:  # noqa: F811
    write({FILE: ACTOR})
    fsdp_worker.watch()
    assert trained() == ["sglang's mode", "ours", "model"]


@pytest.mark.parametrize("asked", [True, False])
def test_the_flag_that_miles_does_not_read_has_its_effect(
    asked: bool,
    write: Write,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before our own start, which writes down what is in force."""
    seen = []
    monkeypatch.setattr(
        start, "start", lambda args: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    write({FILE: ACTOR})
    fsdp_worker.watch()
    try:
        import_module(fsdp_worker.MODULE).FSDPTrainRayActor().init(Args(asked))
        assert seen == [asked] == [torch.are_deterministic_algorithms_enabled()]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_process_that_has_imported_the_trainer_is_pinned_too_and_once(write: Write) -> None:  # noqa: F811
    write({FILE: ACTOR})
    assert trained() == ["sglang's mode", "model"]
    for _ in range(2):
        fsdp_worker.watch()
    assert trained() == ["sglang's mode", "ours", "model"]


def test_two_calls_before_the_import_pin_once(write: Write) -> None:  # noqa: F811
    write({FILE: ACTOR})
    for _ in range(2):
        fsdp_worker.watch()
    assert trained() == ["sglang's mode", "ours", "model"]


@pytest.mark.parametrize("source", ["", "class FSDPTrainRayActor:\n    pass\n"])
def test_a_miles_without_the_step_is_refused(source: str, write: Write) -> None:  # noqa: F811
    write({FILE: source})
    fsdp_worker.watch()
    with pytest.raises(ContractError, match="no FSDPTrainRayActor._enable_true_on_policy.*nothing would pin"):
        import_module(fsdp_worker.MODULE)


def test_what_cannot_be_pinned_keeps_the_trainer_from_starting(write: Write, monkeypatch) -> None:  # noqa: F811
    def refuse(args: Args) -> None:
        raise ContractError("environment: NCCL_ALGO is None")

    monkeypatch.setattr(start, "start", refuse)
    write({FILE: ACTOR})
    fsdp_worker.watch()
    with pytest.raises(ContractError, match="NCCL_ALGO"):
        trained()


def test_workers_that_train_nothing_pay_nothing() -> None:
    code = (
        "import sys; from true_on_policy import fsdp_worker; fsdp_worker.watch(); "
        "print({'torch', 'miles'} & set(sys.modules))"
    )
    done = ran("-c", code)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_launch_names_the_hook() -> None:
    script = (Path(__file__).parents[2] / "scripts" / "run-qwen3-4b-true-on-policy.sh").read_text()
    assert f'"worker_process_setup_hook": "{HOOK}"' in script.replace("\\", "")
    module, _, name = HOOK.rpartition(".")
    assert callable(getattr(import_module(module), name))
    assert launch_flags(gpu_contract("qwen3-dense", "fsdp"))


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
    write: Write,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: str,
    order: Any,
) -> None:
    """Sharded and packed, each sequence has the bits of the `hf` trainer, which scores each sequence alone."""
    contract = Contract(dtype=dtype, norm_order=order)
    write({FILE: ACTOR, f"{fsdp_trainer.REGISTRY.replace('.', '/')}.py": REGISTRY})
    monkeypatch.setattr(start, "start", lambda args: contract)
    fsdp_worker.watch()
    actor = import_module(fsdp_worker.MODULE).FSDPTrainRayActor()
    actor.precision_policy = Namespace(param_dtype=torch.bfloat16, sync_dtype_resolver=None)
    actor.init(Args())
    policy, [hook] = actor.precision_policy, import_module(fsdp_trainer.REGISTRY).HOOKS
    assert policy.param_dtype == policy.sync_dtype_resolver("weight", torch.float16) == contract.torch_dtype
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
    options: Any = {
        "mesh": init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32),
    }
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def test_a_registry_that_is_gone_is_refused(write: Write) -> None:  # noqa: F811
    write({f"{fsdp_trainer.REGISTRY.replace('.', '/')}.py": ""})
    with pytest.raises(ContractError, match="has no register_model_instance_patch"):
        fsdp_trainer.align(Namespace(precision_policy=Namespace()), Contract())
