"""The probes see the kernels themselves: they find what the stock ones do, and one wrong bit in any of ours."""

import pytest
import torch

from true_on_policy.contract.cpu import Contract, Shapes
from true_on_policy.errors import ProbeError
from true_on_policy.kernels import cpu, native
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.probes import failures

# Of two models, with their fused weights and heads.
MODEL = Shapes(
    linear=((128, 256), (320, 1424), (712, 320), (1024, 4096)),
    attention=((4, 2, 32), (6, 2, 64), (16, 8, 128)),
    hidden=(32, 128, 320),
    activated=(256, 712),
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pinned_kernels_hold_at_a_models_shapes(dtype):
    contract = Contract(dtype=dtype, leaves=4, shapes=MODEL)
    with pinned(contract):
        assert list(failures(contract)) == []


@pytest.mark.parametrize(("dtype", "kernels"), [("fp32", {"linear", "attention"}), ("bf16", {"attention"})])
def test_stock_kernels_are_found_out(dtype, kernels):
    assert kernels <= {failure.kernel for failure in failures(Contract(dtype=dtype, shapes=MODEL))}
    with pytest.raises(ProbeError, match=f"the native kernels do not hold in {dtype} with 1 threads: "):
        cpu.probe(Contract(dtype=dtype, shapes=MODEL))


OPERATORS = {
    "mm": "linear",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "mean.dim": "mean",
    "rsqrt": "rsqrt",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_one_bit_in_the_first_row_of_a_batch_is_found(monkeypatch, operator):
    """A kernel that nudges its first output where there are several rows."""
    right = cpu.OVERRIDES[operator]

    def nudged(*args, **kwargs):
        result = right(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        if first.shape[-2 if "attention" in operator else 0] > 1:
            value = first[(0,) * first.dim()]
            value.copy_(torch.nextafter(value, value + 1))
        return result

    contract = Contract()
    with monkeypatch.context() as patch:
        patch.setitem(cpu.OVERRIDES, operator, nudged)
        with pytest.raises(ProbeError, match=f": {OPERATORS[operator]} at .* 1 of "):
            with pinned(contract):
                pass
    with pinned(contract):
        pass


def test_a_leaf_is_probed_too(monkeypatch):
    """The first number of a leaf is nudged where there are several rows; whole products are right."""
    right = native.product

    def wrong_leaf(a, b, out_dtype):
        result = right(a, b, out_dtype)
        if out_dtype != a.dtype and result.shape[1] > 1:
            result[0, 0, 0] *= 1.5
        return result

    monkeypatch.setattr(native, "product", wrong_leaf)
    with pinned(Contract(dtype="bf16")):
        pass
    with pytest.raises(ProbeError, match=": 4 leaves at "):
        with pinned(Contract(dtype="bf16", leaves=4)):
            pass
