"""Megatron-core's own batch-invariant mode, its Triton kernels interpreted on CPU: what a pin of it must survive."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from triton_interpreter import UNAVAILABLE, on_cpu

from true_on_policy.bitwise import equal_bits, ulps
from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.contract.gpu import gpu_contract
from true_on_policy.errors import PinError
from true_on_policy.kernels import megatron, mode, probes
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.probes import aten_failures

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)

CONTRACT = gpu_contract("qwen3-dense", "megatron")
SHAPES = Shapes(linear=((64, 96), (80, 64)), hidden=(64,))
CPU = torch.device("cpu")
OURS = "batch_invariant_kernels.py of megatron"


def registrations() -> list[str]:
    """All that the dispatcher knows of the operators that a mode touches."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in mode.OVERRIDABLE]


@pytest.fixture(autouse=True)
def fewer_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "SIZES", (1, 2, 7, 40))


@pytest.fixture
def library() -> Iterator[ModuleType]:
    """The real module; every test leaves it off, and the dispatcher as it was."""
    module, before = mode.load(megatron.MODE), registrations()
    with on_cpu():
        yield module
    left = module.is_batch_invariant_mode_enabled(), registrations() == before
    if left != (False, True):
        turn(module, on=False)
    assert left == (False, True)


def turn(library: ModuleType, on: bool) -> None:
    """As Megatron does, but for the error that it raises without Transformer Engine when all is done."""
    with suppress(ModuleNotFoundError):
        library.enable_batch_invariant_mode() if on else library.disable_batch_invariant_mode()


@contextmanager
def standing() -> Iterator[None]:
    """A pin that is undone whatever becomes of the body."""
    undo = megatron.pin(CONTRACT)
    try:
        yield
    finally:
        undo()


def stands() -> bool:
    """Whether Triton's products run, by what the dispatcher says and by the bits of one."""
    return {megatron.settings()[f"aten::{name}"] for name in mode.SHARED} == {OURS}


def test_a_pin_stands_and_is_undone(library: ModuleType):
    x, weight = torch.randn(9, 100), torch.randn(37, 100)
    stock = F.linear(x, weight)
    undo = megatron.pin(CONTRACT)
    assert stands() and megatron.settings()["batch-invariant flag"] == "on"
    assert equal_bits(F.linear(x, weight), library.matmul_persistent(x, weight.t()))
    undo()
    assert set(megatron.settings().values()) == {"off", "stock", "absent"}
    assert equal_bits(F.linear(x, weight), stock)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_its_kernels_are_batch_invariant(library: ModuleType, dtype: str):
    with standing():
        assert list(aten_failures(dtype, SHAPES, CPU)) == []


def test_a_bias_is_added_before_the_sum_is_rounded(library: ModuleType):
    """As the contract says of Triton's kernel: 256 + 1 is no bfloat16, 256 + 1 + 1 is one."""
    x, weight = torch.ones(3, 2).bfloat16(), torch.tensor([[256.0, 1.0]]).bfloat16()
    bias = torch.ones(1).bfloat16()
    biased = gpu_contract("qwen2.5-dense", "megatron")
    product = next(row for row in biased.operations if row.name == "q, k, v product")
    with standing():
        assert F.linear(x, weight, bias).flatten().tolist() == [258.0] * 3
        assert (F.linear(x, weight) + bias).flatten().tolist() == [256.0] * 3
    assert product.bits.endswith("+ bias in fp32, then rounded")


def test_log_softmax_of_bf16_is_summed_in_fp32(library: ModuleType):
    """A sum of 3000 ones in bfloat16 would end at 256."""
    logits = torch.zeros(2, 3000).bfloat16()
    with standing():
        found = torch.log_softmax(logits, -1)
    assert found.dtype == torch.bfloat16
    assert ulps(found, logits.float().log_softmax(-1).bfloat16()).max() <= 1


def test_stock_kernels_are_found_out():
    found = {failure.kernel for failure in aten_failures("fp32", SHAPES, CPU)}
    assert {"linear", "linear with a bias"} <= found


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        ("mm_batch_invariant", "linear"),
        ("addmm_batch_invariant", "linear with a bias"),
        ("mean_batch_invariant", "mean"),
        ("_log_softmax_batch_invariant", "log_softmax of torch.bfloat16"),
    ],
)
def test_one_bit_in_the_first_row_of_a_batch_is_found(library: ModuleType, monkeypatch, kernel: str, found: str):
    right = getattr(library, kernel)

    def nudged(*args, **kwargs):
        result = right(*args, **kwargs)
        if len(result) > 1:
            first = result[(0,) * result.dim()]
            first.copy_(torch.nextafter(first, first + 1))
        return result

    monkeypatch.setattr(library, kernel, nudged)
    with standing():
        assert next(aten_failures("bf16", SHAPES, CPU)).kernel == found


def test_its_own_contexts_nest_and_fail_inside_a_pin(library: ModuleType):
    undo = megatron.pin(CONTRACT)
    with library.set_batch_invariant_mode(True):
        pass
    assert stands()
    with pytest.raises(ZeroDivisionError), library.set_batch_invariant_mode(True):
        raise ZeroDivisionError
    assert stands()
    undo()


def test_a_mode_that_was_on_stays_on(library: ModuleType):
    """Megatron turns it on before a host's init hook runs."""
    turn(library, on=True)
    before = registrations()
    megatron.pin(CONTRACT)()
    assert stands() and registrations() == before
    turn(library, on=False)


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (False, "flag of the mode says on, but aten::mm runs stock.*call megatron.core.*disable_"),
        (True, f"the flag of the mode says off, but aten::mm runs {OURS}"),
    ],
)
def test_a_flag_that_contradicts_the_dispatcher_is_refused(library: ModuleType, monkeypatch, on: bool, message: str):
    """A flag without overrides is what a nested context of thinking-machines' original leaves behind."""
    turn(library, on)
    with monkeypatch.context() as patch:
        patch.setattr(library, "_batch_invariant_MODE", not on)
        with pytest.raises(PinError, match=message):
            megatron.pin(CONTRACT)
    turn(library, on=False)


def test_an_enable_that_half_happens_is_undone(library: ModuleType, monkeypatch):
    """The last of its four overrides cannot be installed; without a pin the other three and the flag stay on."""
    before = registrations()
    monkeypatch.setattr(library, "mean_batch_invariant", "no function")
    with pytest.raises(TypeError):
        library.enable_batch_invariant_mode()
    assert library.is_batch_invariant_mode_enabled() and registrations() != before
    turn(library, on=False)
    with pytest.raises(PinError, match="Megatron-core: the batch-invariant mode cannot be enabled .*callable"):
        megatron.pin(CONTRACT)
    assert not library.is_batch_invariant_mode_enabled() and registrations() == before


def test_ctrl_c_within_the_librarys_own_enable_undoes_what_it_did(library: ModuleType, monkeypatch):
    before, enable = registrations(), library.enable_batch_invariant_mode

    def interrupted() -> None:
        with suppress(ModuleNotFoundError):  # of Transformer Engine, once all overrides are in place
            enable()
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "enable_batch_invariant_mode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        megatron.pin(CONTRACT)
    assert not library.is_batch_invariant_mode_enabled() and registrations() == before


def test_an_enable_that_leaves_an_operator_is_refused(library: ModuleType, monkeypatch):
    monkeypatch.setattr(library, "enable_batch_invariant_mode", lambda: setattr(library, "_batch_invariant_MODE", True))
    with pytest.raises(PinError, match="cannot be enabled .aten::mm runs stock on CPU"):
        megatron.pin(CONTRACT)


def test_an_undo_that_leaves_an_operator_says_so(library: ModuleType, monkeypatch):
    undo = megatron.pin(CONTRACT)
    with monkeypatch.context() as patch:
        patch.setattr(library, "disable_batch_invariant_mode", lambda: None)
        with pytest.raises(PinError, match="undoing the mode leaves aten::mm to .*batch_invariant_kernels.py"):
            undo()
    undo()


def test_two_copies_at_once_are_refused(library: ModuleType, write):
    """Here the second copy is any other Python file that holds one of the operators."""
    write({"other_copy.py": "import torch\nlibrary = torch.library.Library('aten', 'IMPL')\n"})
    import other_copy  # pyright: ignore[reportMissingImports]

    other_copy.library.impl("rms_norm", lambda *args: args[0], "CPU")
    try:
        with pytest.raises(PinError, match="aten::rms_norm is overridden already by .*other_copy.py. Two batch-inv"):
            megatron.pin(CONTRACT)
        assert not library.is_batch_invariant_mode_enabled()
    finally:
        other_copy.library._destroy()


def test_an_operator_that_torch_overrides_itself_is_stock(library: ModuleType):
    """CUDA builds of torch 2.13 do so, here by hand; a pin goes over it and leaves it as it was."""
    source = "import torch\nlibrary = torch.library.Library('aten', 'IMPL')\n"
    torchs: dict[str, Any] = {}
    exec(compile(source, mode.OWN / "registry.py", "exec"), torchs)
    torchs["library"].impl("mm", lambda a, b: torch.einsum("ik,kj->ij", a, b), "CPU")
    try:
        before = mode.registration("mm", "CPU")
        assert "_native/registry.py" in before and mode.described("mm", "CPU") == "stock"
        undo = megatron.pin(CONTRACT)
        assert mode.described("mm", "CPU") == OURS
        undo()
        assert mode.registration("mm", "CPU") == before
    finally:
        torchs["library"]._destroy()


def test_our_cpu_kernels_and_the_mode_refuse_each_other(library: ModuleType):
    with pinned(Contract()):
        with pytest.raises(PinError, match=r"aten::mm is overridden already by .*kernels/cpu.py"):
            megatron.pin(CONTRACT)
    with standing():
        with pytest.raises(PinError, match="aten::mm is overridden already .*batch_invariant_kernels.py"):
            with pinned(Contract()):
                pass


def test_this_version_has_no_deep_gemm_of_its_own(library: ModuleType, monkeypatch):
    monkeypatch.setitem(megatron.BACKENDS, "triton_persistent", "deepgemm")
    with pytest.raises(PinError, match="megatron-core .* has Triton's GEMM alone; the contract wants deepgemm"):
        megatron.pin(CONTRACT)


def test_later_versions_are_told_which_products(library: ModuleType, monkeypatch):
    """Megatron-core's main has three, and keeps the one that it was turned on with."""
    enable, asked = library.enable_batch_invariant_mode, []

    def with_backends(backend: str = "te_native") -> None:
        asked.append(backend)
        enable()

    monkeypatch.setattr(library, "enable_batch_invariant_mode", with_backends)
    monkeypatch.setattr(library, "get_batch_invariant_backend", lambda: asked[-1], raising=False)
    megatron.pin(CONTRACT)()
    assert asked == ["triton"]
    with suppress(ModuleNotFoundError):
        library.enable_batch_invariant_mode()
    with pytest.raises(PinError, match="the mode is on with 'te_native'.*Set --batch-invariant-backend triton"):
        megatron.pin(CONTRACT)
    turn(library, on=False)


# What Megatron-core 0.16 replaces in Transformer Engine, with an RMSNorm that inherits its forward.
TE = {
    "transformer_engine/pytorch/__init__.py": """
from transformer_engine.pytorch import cpp_extensions
from transformer_engine.pytorch.module import layernorm, layernorm_linear, linear
class Operation:
    def forward(self, x): return x
class RMSNorm(Operation): ...
""",
    "transformer_engine/pytorch/cpp_extensions.py": "def general_gemm(A, B): return 'stock'\n",
    "transformer_engine/pytorch/module/linear.py": (
        "from transformer_engine.pytorch.cpp_extensions import general_gemm\n"
    ),
    "transformer_engine/pytorch/module/layernorm_linear.py": (
        "from transformer_engine.pytorch.cpp_extensions import general_gemm\n"
    ),
    "transformer_engine/pytorch/module/layernorm.py": "def rmsnorm_fwd(x, weight, eps): return 'stock'\n",
}


def symbols() -> dict[str, object]:
    import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]

    return {
        "cpp": te.cpp_extensions.general_gemm,
        "linear": te.module.linear.general_gemm,
        "layernorm_linear": te.module.layernorm_linear.general_gemm,
        "rmsnorm": te.module.layernorm.rmsnorm_fwd,
        "RMSNorm": vars(te.RMSNorm).get("forward", "inherited"),
    }


def test_transformer_engine_is_pinned_and_restored(library: ModuleType, write):
    """Megatron's own undo would leave RMSNorm a forward of its own, where it had inherited one."""
    write(TE)
    undo = megatron.pin(CONTRACT)
    inside = symbols()
    assert megatron.settings()["te general_gemm"] == megatron.MODE.module
    undo()
    after = symbols()
    assert after["RMSNorm"] == "inherited" and after["cpp"]("A", "B") == "stock"  # pyright: ignore[reportCallIssue]
    assert not set(map(id, inside.values())) & set(map(id, after.values()))
    assert after["cpp"] is after["linear"] is after["layernorm_linear"]
    assert megatron.settings()["te general_gemm"] == "transformer_engine.pytorch.cpp_extensions"


def test_a_transformer_engine_that_is_half_patched_is_restored(library: ModuleType, write, monkeypatch):
    """One module less than Megatron-core expects: it has replaced two symbols when it fails."""
    write(TE)
    before = symbols()
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.layernorm_linear", None)
    with pytest.raises(PinError, match="cannot be enabled .*layernorm_linear"):
        megatron.pin(CONTRACT)
    assert symbols() == before


def test_a_transformer_engine_that_still_multiplies_is_refused(library: ModuleType, write, monkeypatch):
    write(TE)
    monkeypatch.setattr(library, "_te_patch_for_batch_invariant", lambda: None)
    with pytest.raises(PinError, match="is on, but Transformer Engine multiplies by transformer_engine.pytorch.cpp"):
        megatron.pin(CONTRACT)


def test_a_transformer_engine_that_cannot_be_imported_is_refused(library: ModuleType, write):
    write({"transformer_engine/pytorch.py": "raise OSError('libcuda.so.1')\n"})
    with pytest.raises(
        PinError, match="Megatron-core, Transformer Engine: transformer_engine.pytorch cannot be imported .libcuda.so.1"
    ):
        megatron.pin(CONTRACT)
