"""The native kernels, in C: each output has one accumulator, a fixed order of adding, and explicit fma."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from true_on_policy.errors import PinError

NAME = "native"
SOURCE = Path(__file__).with_name("batch_invariant.c")
# No -ffast-math and no contraction. The source writes fma where it fuses, alike in every instance of a kernel.
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno"),
    *("-shared", "-fPIC", "-fopenmp"),
)


@cache
def library() -> ctypes.CDLL:
    """Load the compiled kernels, built at first use; raises PinError without a C compiler that can compile them."""
    compiler = find_compiler()
    # The compiler's macros tell what `-march=native` means on this machine.
    macros = _run(compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull)
    made_of = "\0".join((SOURCE.read_text(encoding="utf-8"), " ".join(FLAGS), macros))
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    fingerprint = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    path = base / "true_on_policy" / f"batch_invariant-{fingerprint}.so"
    if not path.exists():
        _compile(compiler, path)
    return ctypes.CDLL(str(path))


def find_compiler() -> str:
    """Find a C compiler: $CC, else cc, gcc or clang on the path; raises PinError where none is installed."""
    paths = (shutil.which(name) for name in (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))
    compiler = next(filter(None, paths), None)
    if compiler is None:
        raise PinError("the native kernels need a C compiler and none was found; install gcc or clang")
    return compiler


def _compile(compiler: str, path: Path) -> None:
    """Write the library under a temporary name and rename it, so that no process loads half a file.

    The OpenMP calls stay unresolved on purpose: they bind to the runtime that torch has loaded and use its threads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        compiled = Path(folder) / "batch_invariant.o"
        _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled))
        _run(compiler, "-shared", str(compiled), "-lm", "-o", str(unfinished))
        unfinished.replace(path)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise PinError(f"the native kernels do not build here ({done.stderr.strip()}); set CC to gcc or clang")
    return done.stdout


ENTRIES = {torch.float32: "bi_product_f32", torch.bfloat16: "bi_product_bf16"}


class _Product(ctypes.Structure):
    """The ctypes mirror of the struct `product` in the C source, field for field."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("batch", "rows", "columns", "depth")),
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_long) for name in ("a_batch", "a_row", "b_batch", "b_row", "c_batch", "c_row")),
        ("c_is_f32", ctypes.c_int),
    ]


class _Attention(ctypes.Structure):
    """The ctypes mirror of the struct `attention` in the C source, field for field."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("batch", "heads", "groups", "queries", "keys", "width")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "bias", "out", "logsumexp")),
        *((f"{name}_{axis}", ctypes.c_long) for name in "qkv" for axis in ("batch", "head", "row")),
        *((f"bias_{axis}", ctypes.c_long) for axis in ("batch", "head", "row")),
        ("scale", ctypes.c_float),
        ("is_causal", ctypes.c_int),
        ("is_bf16", ctypes.c_int),
    ]


def product(a: Float[Tensor, "B M K"], b: Float[Tensor, "B K N"], out_dtype: torch.dtype) -> Float[Tensor, "B M N"]:
    """Multiply a @ b; the bits of an output depend on its row of `a` and its column of `b` alone."""
    a, columns = _rows(a), _rows(b.transpose(1, 2))
    (batch, rows, depth), width = a.shape, b.shape[2]
    out = torch.empty(batch, rows, width, dtype=out_dtype)
    arguments = _Product(
        *(batch, rows, width, depth),
        *(a.data_ptr(), columns.data_ptr(), out.data_ptr()),
        *(a.stride(0), a.stride(1), columns.stride(0), columns.stride(1), rows * width, width),
        out_dtype == torch.float32,
    )
    kernel = getattr(library(), ENTRIES[a.dtype])
    kernel(ctypes.byref(arguments), torch.get_num_threads())
    return out


def attend(
    query, key, value, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B H Q"]]:
    """Return attention and its logsumexp; a row's bits depend on its visible keys and their order alone.

    Query is [B, H, Q, D]; key and value are [B, G, T, D].
    """
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    (batch, heads, queries, width), (_, groups, keys, _) = query.shape, key.shape
    if bias is not None:
        bias = bias.expand(batch, heads, queries, keys)
        bias = bias if bias.stride(3) == 1 else bias.contiguous()
    out = torch.empty(batch, queries, heads, width, dtype=query.dtype)
    logsumexp = torch.empty(batch, queries, heads)
    arguments = _Attention(
        *(batch, heads, groups, queries, keys, width),
        *(query.data_ptr(), key.data_ptr(), value.data_ptr(), None if bias is None else bias.data_ptr()),
        *(out.data_ptr(), logsumexp.data_ptr()),
        *(stride for x in (query, key, value) for stride in x.stride()[:3]),
        *((0, 0, 0) if bias is None else bias.stride()[:3]),
        *(scale, is_causal, query.dtype == torch.bfloat16),
    )
    if library().bi_attention(ctypes.byref(arguments), torch.get_num_threads()):
        raise MemoryError(f"attention: no memory for the scores of {keys} keys")
    return out.transpose(1, 2), logsumexp.transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """Return x [B, R, C] with contiguous rows; our kernel copies a transposed batch many times as fast as torch."""
    if x.stride(2) == 1:
        return x
    if x.stride(1) != 1:
        return x.contiguous()
    (batch, rows, columns), out = x.shape, torch.empty(x.shape, dtype=x.dtype)
    addresses = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
    longs = (ctypes.c_long(n) for n in (batch, columns, rows, x.stride(0), x.stride(2)))
    library().bi_transpose(addresses[0], *longs, addresses[1], x.element_size(), torch.get_num_threads())
    return out
