"""Pinning nests, survives exceptions, restores what it found, and believes no flag."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from commands import ran

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import Contract
from true_on_policy.errors import ContractError, PinError, ProbeError
from true_on_policy.kernels import cpu, native
from true_on_policy.kernels.pin import active_backend, pin, pinned

NATIVE = Contract()


def dispatcher() -> list[str]:
    """All that the dispatcher knows of the operators that a pin touches."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in cpu.OPERATORS]


@pytest.fixture(autouse=True)
def found():
    """Every test leaves the dispatcher as it found it."""
    before = dispatcher()
    yield before
    assert dispatcher() == before
    assert active_backend() is None


def test_pinned_replaces_every_operator_and_restores_it(found):
    with pinned(NATIVE):
        inside = dispatcher()
        assert active_backend() == "native"
    assert all(now != then for now, then in zip(inside, found, strict=True))


def test_nested_pins_are_one(found):
    x, weight = torch.randn(9, 100), torch.randn(37, 100)
    with pinned(NATIVE):
        outer, result = dispatcher(), F.linear(x, weight)
        with pinned(replace(NATIVE, dtype="bf16")):
            assert dispatcher() == outer
        assert dispatcher() == outer
        assert equal_bits(F.linear(x, weight), result)


def test_an_exception_unpins(found):
    with pytest.raises(ZeroDivisionError):
        with pinned(NATIVE), pinned(NATIVE):
            raise ZeroDivisionError
    assert dispatcher() == found


def test_another_provider_is_refused_and_left_alone():
    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm", lambda a, b: a, "CPU")
    theirs = dispatcher()
    try:
        with pytest.raises(PinError, match="aten::bmm is overridden already .*test_pin.py"):
            pin(NATIVE)
        assert dispatcher() == theirs
    finally:
        library._destroy()


def test_another_provider_inside_a_pin_is_found():
    library = torch.library.Library("aten", "IMPL")
    with pinned(NATIVE):
        library.impl("mm", lambda a, b: a, "CPU")
        try:
            with pytest.raises(PinError, match="aten::mm was overridden inside a pin .*test_pin.py"):
                pin(NATIVE)
        finally:
            library._destroy()


def test_pin_holds_for_the_rest_of_the_process():
    program = """
import torch
from true_on_policy.contract.cpu import Contract
from true_on_policy.kernels.pin import active_backend, pin, pinned
pin(Contract())
with pinned(Contract()):
    pass
print(active_backend(), ".py:" in torch._C._dispatch_dump("aten::mm"))
"""
    done = ran("-c", program)
    assert done.stdout.split() == ["native", "True"], done.stderr


def test_a_failing_probe_raises_and_unpins(monkeypatch, found):
    """The product here gives a row another last bit in a batch than alone."""
    right = native.product

    def broken(a, b, out_dtype):
        made = right(a, b, out_dtype)
        return made if a.shape[1] == 1 else torch.nextafter(made, made + 1)

    monkeypatch.setattr(native, "product", broken)
    with pytest.raises(ProbeError, match=r"linear at \(64, 96\), a row alone and in a batch: 672 of 672"):
        pin(NATIVE)
    assert dispatcher() == found


def test_a_failing_probe_inside_leaves_the_outer_pin(monkeypatch):
    with pinned(NATIVE):
        outer = dispatcher()
        monkeypatch.setattr(cpu, "probe", raises)
        with pytest.raises(ProbeError):
            pin(NATIVE)
        assert dispatcher() == outer


def raises(contract: Contract) -> None:
    raise ProbeError(contract.dtype)


def test_a_failing_install_restores(monkeypatch, found):
    """The last operator's kernel cannot be called: those before it were installed already."""
    installed = cpu._overrides()
    monkeypatch.setattr(cpu, "_overrides", lambda: installed | {list(installed)[-1]: "no function"})
    with pytest.raises(TypeError, match="callable"):
        pin(NATIVE)
    assert dispatcher() == found


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "fp16"}, "contract.dtype: got 'fp16'; choose one of fp32, bf16"),
        ({"norm_order": "hf"}, "contract.norm_order: got 'hf'; choose one of engine, trainer"),
        ({"trainer_tensor_parallel": 2}, "contract.trainer_tensor_parallel: 2 but contract.engine_tensor_parallel: 1"),
        ({"leaves": 3}, "contract.leaves: got 3; choose a power of two"),
        ({"leaves": 0}, "contract.leaves: got 0; choose a power of two"),
        (
            {"leaves": 2, "trainer_tensor_parallel": 4},
            "contract.trainer_tensor_parallel: 4 cannot share out contract.leaves: 2",
        ),
        (
            {"leaves": 4, "engine_tensor_parallel": 3},
            "contract.engine_tensor_parallel: 3 cannot share out contract.leaves: 4",
        ),
    ],
)
def test_contracts_that_cannot_hold(setting, message):
    with pytest.raises(ContractError, match=message):
        Contract(**setting)


def test_leaves_let_tensor_parallelism_differ():
    for trainer, engine in ((1, 4), (2, 1), (4, 2)):
        Contract(leaves=4, trainer_tensor_parallel=trainer, engine_tensor_parallel=engine)
