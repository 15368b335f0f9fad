"""A GPU contract pins several providers at once, or none: the real Megatron-core, and FlashAttention's stand-in."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType

import pytest
import torch
from stand_ins import FLASH_ATTENTION, Write
from triton_interpreter import UNAVAILABLE, on_cpu

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.gpu import MODELS, Size, gpu_contract
from true_on_policy.errors import NotSeenError, PinError, ProbeError
from true_on_policy.kernels import flash_attention, gpu, megatron, mode, precision, probes, provider
from true_on_policy.kernels.pin import active_backend, pin, pinned

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)

CONTRACT = gpu_contract("qwen3-dense", "megatron")
FSDP = dataclasses.replace(CONTRACT, backend="fsdp", engine_gemm="deep_gemm")


@pytest.fixture
def trainer(write: Write, monkeypatch: pytest.MonkeyPatch):
    """Where a Megatron trainer of a tiny model can be pinned; every test leaves it as it was."""
    for name, value in {"SIZES": (1, 2, 40), "LENGTHS": (1, 3, 5)}.items():
        monkeypatch.setattr(probes, name, value)
    for module in (megatron, flash_attention, gpu):
        monkeypatch.setattr(module, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu, "PROBED", Size(64, 32, 4, 2, 16, 48))
    write({"flash_attn_interface.py": FLASH_ATTENTION})
    library = import_module("flash_attn_interface")
    before = everything(library)
    with on_cpu():
        yield library
    assert everything(library) == before and active_backend() is None


@pytest.fixture
def allowed() -> Iterator[Callable[[], None]]:
    """Allows TF32."""
    found = precision._readable()
    yield lambda: torch.set_float32_matmul_precision("high")
    for switch, value in found:
        switch.put(value)


def everything(library: ModuleType) -> tuple:
    """What any of the providers touches."""
    aten = [torch._C._dispatch_dump(f"aten::{name}") for name in mode.OVERRIDABLE]
    flag = mode.load(megatron.MODE).is_batch_invariant_mode_enabled()
    tf32 = [(switch.name, value) for switch, value in precision._readable()]
    return aten, flag, tf32, library.flash_attn_varlen_func, library.flash_attn_with_kvcache


def test_all_providers_are_pinned_and_proven(trainer: ModuleType):
    with pinned(CONTRACT):
        assert active_backend() == "megatron+flash_attention"
        assert gpu.observe(CONTRACT) == {
            "torch: TF32 allowed by": "nothing",
            "megatron: batch-invariant flag": "on",
            **{f"megatron: aten::{name}": "batch_invariant_kernels.py of megatron" for name in mode.SHARED},
            "megatron: te general_gemm": "absent",
            "flash_attention: FA3 module": "flash_attn_interface",
            "flash_attention: FA3 num_splits argument": "accepted",
            "flash_attention: FA3 default num_splits": "1",
        }


def test_pins_nest_and_survive_an_exception(trainer: ModuleType):
    with pytest.raises(ZeroDivisionError):
        with pinned(CONTRACT):
            inside = everything(trainer)
            with pinned(dataclasses.replace(CONTRACT, trainer_tp=2, engine_tp=2)):
                assert everything(trainer) == inside
            assert everything(trainer) == inside
            raise ZeroDivisionError


def test_what_is_switched_inside_a_pin_is_found(trainer: ModuleType):
    with pinned(CONTRACT):
        with suppress(ModuleNotFoundError):  # which it raises without Transformer Engine when all is done
            mode.load(megatron.MODE).disable_batch_invariant_mode()
        with pytest.raises(PinError, match="megatron: batch-invariant flag was overridden inside a pin .off"):
            pin(CONTRACT)


def test_tf32_that_is_allowed_inside_a_pin_is_found(trainer: ModuleType, allowed: Callable[[], None]):
    allowed()
    with pinned(CONTRACT):
        allowed()
        with pytest.raises(PinError, match="TF32 allowed by was overridden inside a pin .*cuda.matmul.fp32_prec"):
            pin(CONTRACT)


@pytest.mark.parametrize(
    ("outer", "inner", "message"),
    [
        (CONTRACT, Contract(), r"'native', but 'megatron\+flash_attention' is pinned"),
        (Contract(), CONTRACT, r"'megatron\+flash_attention', but 'native' is pinned"),
        (CONTRACT, FSDP, r"'sglang\+deep_gemm\+flash_attention', but 'megatron"),
    ],
)
def test_contracts_of_other_kernels_refuse_each_other(trainer: ModuleType, outer, inner, message: str):
    with pinned(outer), pytest.raises(PinError, match=message):
        pin(inner)


def test_a_failing_probe_restores_everything(trainer: ModuleType, monkeypatch):
    """The second provider's kernels, which are probed after the first's."""
    right = trainer._attend
    monkeypatch.setattr(trainer, "_attend", lambda q, *rest: right(q, *rest) + torch.rand(q.shape))
    with pytest.raises(ProbeError, match=r"'megatron' does not hold: attention at \(4, 2, 16\), a sequence of 1 al"):
        pin(CONTRACT)


def test_what_cannot_be_observed_is_undone(trainer: ModuleType, monkeypatch):
    def broken() -> dict[str, str]:
        raise RuntimeError("driver gone")

    monkeypatch.setattr(flash_attention, "settings", broken)
    with pytest.raises(RuntimeError, match="driver gone"):
        pin(CONTRACT)


def test_a_provider_that_cannot_be_pinned_undoes_the_first(trainer: ModuleType, monkeypatch):
    monkeypatch.setattr(flash_attention, "SPLITS", "splits")
    with pytest.raises(PinError, match="no function that takes splits"):
        pin(CONTRACT)


def test_what_is_not_installed_is_named_before_anything_is_touched(trainer: ModuleType, monkeypatch):
    monkeypatch.setattr(megatron, "pin", lambda contract: pytest.fail("pinned"))
    monkeypatch.setattr(flash_attention, "INTERFACES", {})
    with pytest.raises(
        PinError, match=r"pins megatron\+flash_attention, but flash_attention is not installed; install it$"
    ):
        pin(CONTRACT)
    with pytest.raises(PinError, match="but sglang, deep_gemm, flash_attention is not installed; .* --gemm triton"):
        pin(FSDP)


def test_no_device_is_not_seen(trainer: ModuleType, monkeypatch):
    monkeypatch.setattr(megatron, "device", provider.device)
    with pytest.raises(NotSeenError, match="not seen: no CUDA device"):
        pin(CONTRACT)


def test_shapes_of_a_model_and_of_a_rank():
    assert gpu.shapes(CONTRACT).linear == (*((2560, 6144), (4096, 2560), (2560, 19456), (9728, 2560)), (2560, 151936))
    size = MODELS["qwen3-4B"][1]
    rank = gpu.shapes(dataclasses.replace(CONTRACT, trainer_tp=8, engine_tp=8, size=size))
    assert rank.linear == ((2560, 768), (512, 2560), (2560, 2432), (1216, 2560), (2560, 18992))
    assert rank.attention == ((4, 1, 128),) and rank.hidden == (2560, 128)
