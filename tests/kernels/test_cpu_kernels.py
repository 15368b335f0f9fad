"""Batch-invariant CPU kernels: by bytes, over every company a row can have, with the stock kernels as the control."""

import platform

import pytest
import torch
import torch.nn.functional as F
from tolerances import attention_atol, gradient_rtol, product_atol
from torch.utils.checkpoint import checkpoint

from lab import exhaustive
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.errors import PinError
from true_on_policy.kernels import native as build
from true_on_policy.kernels.pin import pinned

SHORT = (33, 100, 130)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_notices_its_company(dtype):
    with pinned(Contract(dtype=dtype)):
        tally = exhaustive.run(DTYPES[dtype], SHORT, SHORT, every_row=False)
    assert tally.labels == []
    assert tally.compared.total() > 3000


def test_ten_thousand_comparisons():
    """M from 1 to 64 at three positions, K and N of 33, 37, 100, 130 and 2560."""
    with pinned(Contract()):
        tally = exhaustive.run(torch.float32)
    assert tally.labels == []
    assert tally.compared.total() > 10_000


@pytest.mark.parametrize(
    ("dtype", "families"),
    [("fp32", {"mm", "layout", "columns", "attention", "mean", "silu"}), ("bf16", {"attention", "rsqrt"})],
)
def test_stock_kernels_fail(dtype, families):
    """The control: without it the suite could be blind. Which products fail in bf16 depends on the machine."""
    tally = exhaustive.run(DTYPES[dtype], SHORT, SHORT, every_row=False)
    assert families <= set(tally.failed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_a_bit(dtype):
    """At K of 2560 the stock products do depend on threads."""
    before, tallies = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with pinned(Contract(dtype=dtype)):
                tallies.append(exhaustive.run(DTYPES[dtype], (37, 2560), (300,), every_row=False))
    finally:
        torch.set_num_threads(before)
    assert all(tally.labels == [] for tally in tallies)
    assert len({tally.digest for tally in tallies}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 33, 128, 1100])
def test_products_are_right(dtype, depth):
    torch.manual_seed(depth)
    a, b, bias = (torch.randn(size).to(DTYPES[dtype]) for size in ((35, depth), (depth, 50), (50,)))
    with pinned(Contract(dtype=dtype)):
        plain, biased = a @ b, torch.addmm(bias, a, b, beta=2, alpha=0.5)
        batched = torch.baddbmm(bias[None, None], a[None], b[None], beta=0)
    exact = a.double() @ b.double()
    for result in (plain, batched[0]):
        assert ((result.double() - exact).abs() <= product_atol(a, b)).all()
    assert ((biased.double() - (2 * bias.double() + 0.5 * exact)).abs() <= product_atol(a, b, bias)).all()


@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_empty_products(sizes):
    rows, depth, columns = sizes
    with pinned(Contract()):
        result = torch.ones(rows, depth) @ torch.ones(depth, columns)
    assert equal_bits(result, torch.zeros(rows, columns))


def test_other_dtypes_and_errors_are_the_stock_ones():
    a, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    stock = a @ b
    with pinned(Contract()):
        assert equal_bits(a @ b, stock)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.randn(5, 7), torch.randn(6, 3))
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(torch.randn(5, 7), torch.randn(7, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("operator", "sizes"),
    [
        (torch.mm, [(2, 3, 4), (2, 4, 5)]),
        (torch.bmm, [(3, 4), (4, 5)]),
        (torch.bmm, [(3, 3, 4), (2, 4, 5)]),
        (torch.addmm, [(5,), (2, 3, 4), (2, 4, 5)]),
        (torch.baddbmm, [(5,), (3, 4), (4, 5)]),
    ],
)
def test_tensors_of_another_rank_or_batch_are_refused_as_by_stock_kernels(operator, sizes):
    with pinned(Contract()), pytest.raises((RuntimeError, IndexError)):
        operator(*map(torch.ones, sizes))


def test_in_place_and_out_forms():
    x, a, b = torch.randn(9, 100), torch.randn(9, 33), torch.randn(33, 100)
    with pinned(Contract()):
        for name in ("silu", "sigmoid", "rsqrt"):
            positive = x.abs() + 1
            function = getattr(torch.ops.aten, name)
            expected = function(positive)
            assert equal_bits(function.out(positive, out=torch.empty(0)), expected)
            assert equal_bits(getattr(torch.ops.aten, f"{name}_")(positive), expected)
        assert equal_bits(x.clone().addmm_(a, b), torch.addmm(x, a, b))
        assert equal_bits(torch.mean(x, [0], out=torch.empty(0)), x.mean([0]))
        assert equal_bits(torch.softmax(x, 0), torch.softmax(x.t().contiguous(), 1).t().contiguous())


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 65536), (7,), ()])
@pytest.mark.parametrize("keepdim", [True, False])
def test_mean_has_the_shape_and_value_of_the_stock_one(shape, keepdim):
    x = torch.randn(shape)
    for dims in ((0,), (-1,), tuple(range(len(shape))), ()):
        stock = x.double().mean(dims, keepdim=keepdim)
        with pinned(Contract()):
            ours = x.mean(dims, keepdim=keepdim)
        assert ours.shape == stock.shape
        assert torch.allclose(ours.double(), stock, atol=1e-6)


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient():
    query, key, value = (torch.randn(1, 2, 4, 32, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[1] = False
    with pinned(Contract()):
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[None, None])
        gradients = torch.autograd.grad(out[:, :, 1].sum(), (query, key, value))
    assert equal_bits(out[:, :, 1], torch.zeros(1, 2, 32))
    assert not any(gradient.any() for gradient in gradients)


def test_keys_with_gaps_equal_the_same_keys_without():
    query, key, value = (torch.randn(1, 4, 40, 64) for _ in range(3))
    seen = torch.rand(40) < 0.6
    with pinned(Contract()):
        gaps = F.scaled_dot_product_attention(query, key, value, attn_mask=seen.expand(1, 1, 40, 40))
        close = F.scaled_dot_product_attention(query, key[:, :, seen], value[:, :, seen])
    assert equal_bits(gaps, close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_of_numbers_that_differs_between_heads(dtype):
    query, key, value = (torch.randn(2, count, 12, 32).to(DTYPES[dtype]) for count in (4, 2, 2))
    bias = torch.randn(2, 4, 12, 12).to(DTYPES[dtype])
    bias[:, 1, :, :5] = -torch.inf
    attend = lambda *x, mask: F.scaled_dot_product_attention(*x, attn_mask=mask, enable_gqa=True)  # noqa: E731
    exact = attend(query.double(), key.double(), value.double(), mask=bias.double())
    with pinned(Contract(dtype=dtype)):
        ours = attend(query, key, value, mask=bias)
    assert ((ours.double() - exact).abs() <= attention_atol(query, key.repeat_interleave(2, 1), value, bias)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_and_without_checkpointing(dtype):
    """The stock backward takes our logsumexp; checkpointing runs our forward again, to the bits of an evaluation."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, dtype=torch.float64) / 8

    def layer(x, w):
        heads = F.linear(x, w).view(2, 30, 4, 16).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.silu(attended.transpose(1, 2).reshape(2, 30, 64))

    torch.manual_seed(1)
    tokens = torch.randn(2, 30, 64, dtype=torch.float64)

    def gradients(run, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (tokens, weight)]
        return torch.autograd.grad(run(*leaves).float().square().sum(), leaves)

    exact = gradients(layer, torch.float64)
    with pinned(Contract(dtype=dtype)):
        plain = gradients(layer, DTYPES[dtype])
        again = gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False), DTYPES[dtype])
        leaves = [x.to(DTYPES[dtype]).requires_grad_() for x in (tokens, weight)]
        with torch.no_grad():
            evaluated = layer(*leaves)
        assert equal_bits(layer(*leaves).detach(), evaluated)
    for ours, recomputed, wanted in zip(plain, again, exact, strict=True):
        assert equal_bits(ours, recomputed)
        assert (ours.double() - wanted).norm() <= gradient_rtol(ours.dtype) * wanted.norm()


def test_without_a_compiler_native_says_what_to_do(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build.library.cache_clear()
    with pytest.raises(PinError, match="the native kernels need a C compiler and none was found; install gcc"):
        with pinned(Contract()):
            pass


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    build.library.cache_clear()
    with pytest.raises(PinError, match="the native kernels do not build here .*no such option.*set CC"):
        with pinned(Contract()):
            pass


def test_the_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    build.library()
    (compiled,) = (tmp_path / "true_on_policy").iterdir()
    written = compiled.stat().st_mtime_ns
    build.library.cache_clear()
    build.library()
    assert compiled.stat().st_mtime_ns == written
    build.library.cache_clear()


def test_narrower_instructions_give_the_same_bits(monkeypatch, tmp_path):
    """Half as wide, with and without fma in hardware: float32 is the same to the bit, products and attention."""
    x, weight, heads = torch.randn(9, 1100), torch.randn(37, 1100), torch.randn(2, 2, 50, 33)

    def results() -> list[torch.Tensor]:
        build.library.cache_clear()
        with pinned(Contract()):
            return [F.linear(x, weight), F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)]

    own = results()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for narrower in (("-O1", "-mno-avx512f"), ("-O1", "-mno-avx512f", "-mno-fma", "-mno-avx2")):
        if platform.machine() == "x86_64":
            monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *narrower))
        assert all(equal_bits(ours, wide) for ours, wide in zip(results(), own, strict=True))
    build.library.cache_clear()
