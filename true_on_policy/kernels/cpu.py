"""Batch-invariant kernels on the CPU dispatch key, below autograd, and one way to install them.

Products and attention come from `native`, other operators from their stock kernels. Measured hazards of the stock
kernels: a reduction over a strided dimension adds in another order; a mean with one output is split over threads;
silu, sigmoid and rsqrt take another code path for elements beyond the last whole vector of a thread's share. So every
tensor is made contiguous, a single row is doubled, and the number of elements is padded.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from true_on_policy.contract.cpu import Contract
from true_on_policy.errors import PinError, ProbeError
from true_on_policy.kernels import native
from true_on_policy.kernels.mode import registration
from true_on_policy.kernels.probes import failures
from true_on_policy.kernels.provider import Undo

SERVED = (torch.float32, torch.bfloat16)


def product(rank: int, stock, keyset, a: Tensor, b: Tensor) -> Tensor:
    """Compute mm of two matrices (`rank` 2), or bmm of two batches of matrices (3)."""
    return _multiply(a, b, a.dtype) if _served(rank, a, b) else stock.call_boxed(keyset, a, b)


def sum_with_product(rank: int, stock, keyset, bias: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    """Compute addmm (`rank` 2) or baddbmm (3)."""
    if not _served(rank, a, b, bias):
        return stock.call_boxed(keyset, bias, a, b, beta=beta, alpha=alpha)
    return _add(bias, _multiply(a, b, torch.float32), beta, alpha)


def _multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply two matrices, or two batches of matrices, by the native kernel."""
    return native.product(a, b, dtype) if a.dim() == 3 else native.product(a[None], b[None], dtype)[0]


def _served(rank: int, a: Tensor, b: Tensor, *others: Tensor) -> bool:
    """Whether the native kernels serve this call; other dtypes and shapes that do not fit go to the stock kernel."""
    fit = a.dim() == b.dim() == rank and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    return fit and a.dtype in SERVED and all(x.dtype == a.dtype for x in (b, *others))


def _add(bias: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute beta * bias + alpha * product in float32 and round once; beta 0 ignores even a NaN in bias."""
    if alpha != 1:
        product = product * alpha
    if beta == 0:
        return product.to(bias.dtype)
    return (product + (bias if beta == 1 else bias.float() * beta)).to(bias.dtype)


def attention(
    stock,
    keyset,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend by the native kernel, or by the stock kernel for a dtype that the native kernel does not serve.

    Returns:
        Output [B, H, Q, D] and logsumexp [B, H, Q], in the memory layout of the stock kernel.
    """
    if query.dtype not in SERVED:
        kwargs = {"attn_mask": attn_mask, "scale": scale}
        return stock.call_boxed(keyset, query, key, value, dropout_p, is_causal, **kwargs)
    factor, bias = query.shape[-1] ** -0.5 if scale is None else scale, attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # 0 shows a key, -inf hides it
        bias = torch.zeros(attn_mask.shape).masked_fill_(~attn_mask, float("-inf"))
    return native.attend(query, key, value, None if bias is None else bias.float(), is_causal, factor)


# ATen splits elementwise work into shares of at least this many elements (at::internal::GRAIN_SIZE).
GRAIN = 32768
# The most elements that ATen's unrolled loop takes at once: two 512-bit vectors of 16-bit lanes.
VECTORS = 64


def softmax(stock, keyset, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Compute _softmax or _log_softmax along `dim`, on contiguous rows."""
    if x.dim() == 0:
        return stock.call_boxed(keyset, x, dim, half_to_float)
    rows = x.movedim(dim, -1).contiguous()
    return stock.call_boxed(keyset, rows, rows.dim() - 1, half_to_float).movedim(-1, dim)


def mean(stock, keyset, x: Tensor, dim, keepdim: bool = False, *, dtype=None) -> Tensor:
    """Compute mean.dim; a single row is summed beside a copy of itself."""
    if x.dim() == 0:
        return stock.call_boxed(keyset, x, dim, keepdim, dtype=dtype)
    rows, shape = _rows(x, dim, keepdim)
    if len(rows) == 1:
        rows = rows.expand(2, -1).contiguous()
    return stock.call_boxed(keyset, rows, [1], False, dtype=dtype)[: math.prod(shape)].reshape(shape)


def _rows(x: Tensor, dim, keepdim: bool) -> tuple[Tensor, list[int]]:
    """Return `x` as contiguous [outputs, reduced], and the shape of its mean."""
    reduced = {d % x.dim() for d in dim} if dim else set(range(x.dim()))
    kept = [d for d in range(x.dim()) if d not in reduced]
    shape = [1 if d in reduced else x.shape[d] for d in range(x.dim()) if keepdim or d not in reduced]
    outputs = math.prod(x.shape[d] for d in kept)
    elements = math.prod(x.shape[d] for d in reduced)
    return x.permute(*kept, *sorted(reduced)).reshape(outputs, elements).contiguous(), shape


def pointwise(stock, keyset, x: Tensor) -> Tensor:
    """Compute an elementwise kernel on `x`, padded so that only whole vectors are computed."""
    if x.dtype not in SERVED:
        return stock.call_boxed(keyset, x)
    flat = x.contiguous().view(-1)
    elements = flat.numel()
    extra = whole_vectors(elements, torch.get_num_threads()) - elements
    if extra:
        flat = torch.nn.functional.pad(flat, (0, extra))
    return stock.call_boxed(keyset, flat)[:elements].view(x.shape)


def whole_vectors(elements: int, threads: int) -> int:
    """Return the least number, not below `elements`, that splits into whole vectors for every thread."""
    padded = elements
    while True:
        shares = max(min(threads, math.ceil(padded / GRAIN)), 1)
        if padded % (shares * VECTORS) == 0:
            return padded
        padded = math.ceil(padded / (shares * VECTORS)) * shares * VECTORS


OVERRIDES = {
    "mm": partial(product, 2),
    "bmm": partial(product, 3),
    "addmm": partial(sum_with_product, 2),
    "baddbmm": partial(sum_with_product, 3),
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_softmax": softmax,
    "_log_softmax": softmax,
    "mean.dim": mean,
    "silu": pointwise,
    "sigmoid": pointwise,
    "rsqrt": pointwise,
}
# Other spellings of an operator: the form that writes into `out`, and the form that writes into its first argument.
OUT_FORMS = {f"{name}.out": name for name in OVERRIDES if "." not in name and "flash" not in name}
OUT_FORMS["mean.out"] = "mean.dim"
INPLACE_FORMS = {f"{name}_": name for name in ("addmm", "baddbmm", "silu", "sigmoid", "rsqrt")}
OPERATORS = (*OVERRIDES, *OUT_FORMS, *INPLACE_FORMS)


def name(contract: Contract) -> str:
    return native.NAME


def observe(contract: Contract) -> dict[str, str]:
    """Read the dispatcher's line on each of `OPERATORS`."""
    return {f"aten::{name}": registration(name, "CPU") for name in OPERATORS}


def install(contract: Contract) -> Undo:
    """Override `OPERATORS` on the CPU key, and return a function that restores the previous kernels.

    Raises:
        PinError: another provider holds an operator, or there is no compiler, or it fails.
    """
    for operator, kernel in observe(contract).items():
        if ".py:" in kernel:  # another library's batch-invariant mode put it there
            raise PinError(f"{operator} is overridden already ({kernel}); leave that mode before you pin")
    native.library()
    overrides = _overrides()
    library = torch.library.Library("aten", "IMPL")
    with ExitStack() as undo, warnings.catch_warnings():
        undo.callback(library._destroy)
        warnings.filterwarnings("ignore", message=".*\n?.*Overriding a previously", category=UserWarning)
        for name, override in overrides.items():
            library.impl(name, override, "CPU", with_keyset=True)
        return undo.pop_all().close


def _overrides() -> dict[str, Callable]:
    """Build every override around its stock kernel, before the first override is installed."""
    stock = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in OVERRIDES}
    functions = {name: partial(function, stock[name]) for name, function in OVERRIDES.items()}
    outs = {name: partial(_into_out, functions[function]) for name, function in OUT_FORMS.items()}
    inplace = {name: partial(_into_self, functions[function]) for name, function in INPLACE_FORMS.items()}
    return functions | outs | inplace


def _into_out(function: Callable, keyset, *args, out: Tensor, **kwargs) -> Tensor:
    result = function(keyset, *args, **kwargs)
    return out.resize_(result.shape).copy_(result)


def _into_self(function: Callable, keyset, x: Tensor, *args, **kwargs) -> Tensor:
    return x.copy_(function(keyset, x, *args, **kwargs))


def probe(contract: Contract) -> None:
    """Try every kernel at the shapes and dtype of `contract`; raises ProbeError where a batch changes a row's bits."""
    failure = next(failures(contract), None)
    if failure is not None:
        raise ProbeError(
            f"the native kernels do not hold in {contract.dtype} with {torch.get_num_threads()} threads: {failure}"
        )
