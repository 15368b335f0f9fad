"""Other libraries' Triton kernels on CPU tensors: Triton's own interpreter, with two of its defects mended.

`tl.dot` of the interpreter multiplies the raw bits of bfloat16 as integers, and adds up float32 by a BLAS whose sum
depends on the place of a row in a tile: a batch-invariant kernel would not be one. Kernels are interpreted if this file
is imported before triton, as conftest.py does.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

COMPILED = torch.cuda.is_available()
if not COMPILED:
    os.environ["TRITON_INTERPRET"] = "1"

# Why nothing can be interpreted here; empty where it can.
UNAVAILABLE = (
    "a CUDA device is here: Triton's kernels are compiled, not interpreted"
    if COMPILED
    else ""
    if importlib.util.find_spec("triton")
    else "triton is not installed; pip install -e '.[dev]'"
)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Dots in one order of addition, tensors that say they lie on a GPU, which some kernels ask for, no accelerator.

    A CUDA build of torch names CUDA as its accelerator where there is no device, too.
    """
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right, total = _float32(a), _float32(b), d.data.copy()
        # A tile of a small product is zeros but for a corner, and a zero changes no sum: they begin at +0.
        rows, inner, columns = (np.flatnonzero(x) for x in (left.any(1), left.any(0), right.any(0)))
        corner = np.ix_(rows, columns)
        for k in inner:
            total[corner] += left[rows, k, None] * right[k, columns]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda check_available=False: None),
    ):
        yield


def _float32(x) -> np.ndarray:
    if x.dtype.scalar.name == "bf16":
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    return x.data
