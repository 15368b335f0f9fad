"""DeepGEMM's switch and FlashAttention-3 with one split, each on a stand-in that needs them, and what providers share.

The stand-in of DeepGEMM has products that depend on their company unless its switch is on; that of FlashAttention-3
rounds in two parts unless told not to.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

import pytest
import torch
from stand_ins import FLASH_ATTENTION, Write, deep_gemm_source

from lab.gpu import attention
from lab.gpu.attention import decode_failures, mixed_failures
from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.gpu import gpu_contract
from true_on_policy.errors import NotSeenError, PinError
from true_on_policy.kernels import deep_gemm, flash_attention, megatron, probes
from true_on_policy.kernels.probes import product_failures
from true_on_policy.kernels.provider import counted

FSDP, MEGATRON = (gpu_contract("qwen3-dense", trainer) for trainer in ("fsdp", "megatron"))
SHAPES = Shapes(linear=((48, 32), (64, 16)), attention=((4, 2, 16),))
SGL, FORK = deep_gemm.SWITCHES
CPU = torch.device("cpu")

# A caller that holds the functions under its own names, as Transformer Engine and Megatron-core do.
CALLER = """
from flash_attn_interface import flash_attn_with_kvcache as cached
import flash_attn_interface as fa
packed = fa.flash_attn_varlen_func
combine = fa.flash_attn_combine
"""


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "SIZES", (1, 2, 7))
    monkeypatch.setattr(probes, "LENGTHS", (1, 5, 9))
    monkeypatch.setattr(attention, "POSITIONS", (0, 4, 8))


@pytest.mark.parametrize(
    ("provider", "source", "message"),
    [
        (deep_gemm, None, "deep_gemm cannot be imported"),
        (deep_gemm, {"deep_gemm.py": "raise OSError('libcudart.so.13')\n"},
         "DeepGEMM: deep_gemm cannot be imported .libcudart.so.13"),
        (flash_attention, None, "not installed; looked for flash_attn_interface, flash_attn_3"),
        (flash_attention, {"flash_attn_interface.py": "raise OSError('libcudart.so.12')\n"},
         "flash_attn_interface cannot be imported .libcudart.so.12"),
    ],
)  # fmt: skip
def test_a_library_that_is_not_installed_or_does_not_load_is_refused(
    write: Write, provider: ModuleType, source: Mapping[str, str] | None, message: str
):
    if source is None:
        assert provider.version() is None and provider.settings() == {}
    write(source or {})
    with pytest.raises(PinError, match=message):
        provider.pin(FSDP)


@pytest.mark.parametrize("provider", [megatron, deep_gemm, flash_attention])
def test_without_a_device_nothing_is_seen(write: Write, provider: ModuleType):
    write({"deep_gemm.py": deep_gemm_source(), "flash_attn_interface.py": FLASH_ATTENTION})
    with pytest.raises(NotSeenError, match="not seen: no CUDA device"):
        next(provider.probe(MEGATRON, SHAPES))


def failures() -> list:
    return list(product_failures("deep_gemm", "bf16", SHAPES, CPU, deep_gemm.product))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("switches", [(SGL,), (FORK,), (SGL, FORK)], ids=["sgl", "fork", "both"])
def test_every_switch_is_turned_and_turned_back(write: Write, switches, before: bool):
    write({"deep_gemm.py": deep_gemm_source(*switches, before=before)})
    undo = deep_gemm.pin(FSDP)
    library = sys.modules["deep_gemm"]
    getters = [getter for _, getter in switches]
    assert all(getattr(library, getter)() is True for getter in getters)
    assert deep_gemm.settings() == {"DeepGEMM switch": ", ".join(getters), "DeepGEMM mode": "deterministic"}
    assert failures() == []
    undo()
    assert all(getattr(library, getter)() is before for getter in getters)


def test_deep_gemm_off_is_found_out(write: Write):
    write({"deep_gemm.py": deep_gemm_source(SGL)})
    deep_gemm.pin(FSDP)()
    assert deep_gemm.settings()["DeepGEMM mode"] == "cuBLASLt"
    assert {failure.company for failure in failures()} >= {"1 of 7 rows and all"}


def test_one_switch_of_two_is_not_enough(write: Write):
    write({"deep_gemm.py": deep_gemm_source(SGL, FORK)})
    deep_gemm.pin(FSDP)()
    sys.modules["deep_gemm"].use_deterministic_algorithms(True)
    assert deep_gemm.settings()["DeepGEMM mode"] == "cuBLASLt"
    assert failures()


def test_versions_of_deep_gemm_without_a_switch_are_always_invariant(write: Write):
    write({"deep_gemm.py": deep_gemm_source()})
    deep_gemm.pin(FSDP)()
    assert deep_gemm.settings() == {"DeepGEMM switch": "none", "DeepGEMM mode": "always invariant"}
    assert failures() == []


def test_a_setter_without_a_getter_is_refused(write: Write):
    write({"deep_gemm.py": deep_gemm_source() + "def set_batch_invariant(on): ...\n"})
    with pytest.raises(PinError, match="of set_batch_invariant and get_batch_invariant it has one alone"):
        deep_gemm.pin(FSDP)


def test_a_switch_without_effect_is_refused_and_the_first_turned_back(write: Write):
    deaf = "def set_batch_invariant(on): ...\ndef get_batch_invariant(): return False\n"
    write({"deep_gemm.py": deep_gemm_source(SGL) + deaf})
    with pytest.raises(PinError, match=r"cannot be switched on \(set_batch_invariant\(True\) has no effect\)"):
        deep_gemm.pin(FSDP)
    assert deep_gemm.settings()["DeepGEMM mode"] == "cuBLASLt"
    assert sys.modules["deep_gemm"].get_deterministic_algorithms() is False


def test_ctrl_c_at_the_second_switch_turns_the_first_back(write: Write):
    interrupted = (
        "def set_batch_invariant(on):\n    if on: raise KeyboardInterrupt\ndef get_batch_invariant(): return False\n"
    )
    write({"deep_gemm.py": deep_gemm_source(SGL) + interrupted})
    with pytest.raises(KeyboardInterrupt):
        deep_gemm.pin(FSDP)
    assert sys.modules["deep_gemm"].get_deterministic_algorithms() is False


def test_the_version_of_deep_gemm_is_read_without_importing_it(write: Write):
    write({"deep_gemm.py": "raise OSError('libcudart.so.13')\n"})
    assert deep_gemm.version() == "deep_gemm of unknown version"
    write({"sgl_deep_gemm-0.2.5.dist-info/METADATA": "Name: sgl-deep-gemm\nVersion: 0.2.5\n"})
    assert deep_gemm.version() == "sgl-deep-gemm 0.2.5"
    assert deep_gemm.settings() == {"DeepGEMM switch": "not imported", "DeepGEMM mode": "not imported"}


@pytest.fixture
def library(write: Write):
    write({"flash_attn_interface.py": FLASH_ATTENTION, "caller.py": CALLER, "late.py": CALLER})
    return import_module("flash_attn_interface")


def decoded(library, longest: int) -> list[str]:
    return [failure.company for failure in decode_failures("bf16", SHAPES, CPU, library, longest)]


LATE = [f"token {t} decoded and prefilled" for t in (4, 8)]


def test_a_pin_makes_decode_in_causal_tiles_equal_prefill(library):
    assert decoded(library, 2) == LATE
    undo = flash_attention.pin(MEGATRON)
    assert decoded(library, 2) == []
    assert set(library.calls[-3:]) == {1}
    undo()
    assert decoded(library, 2) == LATE


def test_a_pin_holds_where_a_lone_query_has_other_tiles(library, monkeypatch: pytest.MonkeyPatch):
    """Upstream drops the causal mask of a lone query on a contiguous cache: a trainer makes no such call."""
    monkeypatch.setattr(flash_attention, "device", lambda: CPU)
    undo = flash_attention.pin(MEGATRON)
    assert list(flash_attention.probe(MEGATRON, SHAPES)) == []
    assert decoded(library, 1) == LATE
    assert [failure.company for failure in mixed_failures("bf16", SHAPES, CPU, library)] == [
        "a decoding sequence alone and in a mixed batch"
    ]
    undo()


def test_every_caller_is_pinned_under_its_own_name_and_restored(library):
    caller = import_module("caller")
    before = dict(vars(caller)), dict(vars(library))
    undo = flash_attention.pin(MEGATRON)
    late = import_module("late")
    assert caller.cached is late.cached is library.flash_attn_with_kvcache is not before[0]["cached"]
    assert caller.packed is library.flash_attn_varlen_func is not before[0]["packed"]
    assert caller.combine is before[0]["combine"]
    undo()
    assert (dict(vars(caller)), dict(vars(library))) == before
    assert late.cached is library.flash_attn_with_kvcache and late.packed is library.flash_attn_varlen_func


def test_ctrl_c_while_callers_are_pinned_restores_each(library, monkeypatch: pytest.MonkeyPatch):
    replace, interrupts = flash_attention.replace_everywhere, iter([KeyboardInterrupt])

    def interrupted(replacements: Mapping) -> None:
        replace(replacements)
        for interrupt in interrupts:
            raise interrupt

    before = dict(vars(library))
    monkeypatch.setattr(flash_attention, "replace_everywhere", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flash_attention.pin(MEGATRON)
    assert dict(vars(library)) == before


@pytest.mark.parametrize("splits", [(), (0,), (3,)])
def test_one_split_is_passed_whatever_a_caller_asks(library, splits):
    q, starts = torch.randn(2, 4, 16), torch.tensor([0, 2])
    undo = flash_attention.pin(MEGATRON)
    library.flash_attn_varlen_func(q, q, q, starts, starts, 2, 2, True, *splits)
    library.flash_attn_varlen_func(q, q, q, starts, starts, 2, 2, num_splits=7)
    assert library.calls[-2:] == [1, 1]
    undo()
    library.flash_attn_varlen_func(q, q, q, starts, starts, 2, 2, True, *splits)
    assert library.calls[-1] == (splits or (1,))[0]


def test_settings_show_what_a_caller_would_get(library):
    name = {"FA3 module": "flash_attn_interface", "FA3 num_splits argument": "accepted"}
    assert flash_attention.settings() == name | {"FA3 default num_splits": "0, 1"}
    undo = flash_attention.pin(MEGATRON)
    assert flash_attention.settings() == name | {"FA3 default num_splits": "1"}
    undo()
    assert flash_attention.settings() == name | {"FA3 default num_splits": "0, 1"}


def test_the_first_build_that_miles_would_take(write: Write):
    write({"sgl_kernel/flash_attn.py": "raise OSError\n", "sgl_kernel/__init__.py": "raise OSError\n"})
    assert flash_attention.interface() == "sgl_kernel.flash_attn"
    assert flash_attention.version() == "sgl_kernel.flash_attn of unknown version"
    write({"flash_attn_3/flash_attn_interface.py": FLASH_ATTENTION})
    assert flash_attention.interface() == "flash_attn_3.flash_attn_interface"
    write({"flash_attn_3-3.0.1.dist-info/METADATA": "Name: flash-attn-3\nVersion: 3.0.1\n"})
    assert flash_attention.version() == "flash-attn-3 3.0.1"
    assert flash_attention.settings() == {
        "FA3 module": "flash_attn_3.flash_attn_interface",
        "FA3 num_splits argument": "not imported",
    }
    assert "sgl_kernel" not in sys.modules and "flash_attn_3" not in sys.modules


def test_a_build_without_the_argument_is_refused(write: Write):
    write({"flash_attn_interface.py": "def flash_attn_varlen_func(q, k, v): ...\n"})
    with pytest.raises(PinError, match="flash_attn_interface has no function that takes num_splits"):
        flash_attention.pin(MEGATRON)
    assert flash_attention.settings()["FA3 num_splits argument"] == "absent"


@pytest.mark.parametrize("inherited", [False, True])
def test_a_function_whose_calls_were_counted_is_put_back(inherited: bool):
    class Owner:
        double = staticmethod(lambda x: 2 * x)

    class Heir(Owner):
        pass

    owner = Heir if inherited else Owner
    before = dict(vars(owner))
    with counted(owner, "double", lambda: "called") as calls:
        assert owner.double(3) == 6 and calls == ["called"]
    assert vars(owner) == before
