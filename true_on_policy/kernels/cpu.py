"""Batch-invariant kernels on the CPU dispatch key, below autograd: two backends, one way to install them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from true_on_policy.kernels import attention, elementwise, gemm
from true_on_policy.kernels.native import NATIVE
from true_on_policy.kernels.tile import TILE

Uninstall = Callable[[], None]


@runtime_checkable
class Backend(Protocol):
    """What a backend computes by itself; all overrides are built from these two."""

    @property
    def name(self) -> str: ...

    def prepare(self) -> None:
        """Make the backend ready; raises PinError where it cannot run."""
        ...

    def product(
        self, a: Float[Tensor, "B M K"], b: Float[Tensor, "B K N"], out_dtype: torch.dtype
    ) -> Float[Tensor, "B M N"]:
        """a @ b; a row's bits depend on that row and on its column of `b` alone."""
        ...

    def attend(
        self,
        query: Float[Tensor, "B H Q D"],
        key: Float[Tensor, "B G T D"],
        value: Float[Tensor, "B G T D"],
        bias: Float[Tensor, "..."] | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Float[Tensor, "B H Q D"], Float[Tensor, "B H Q"]]:
        """Attention and its logsumexp; a row's bits depend on its own visible keys, in their order, alone."""
        ...


BACKENDS: dict[str, Backend] = {NATIVE.name: NATIVE, TILE.name: TILE}

FUNCTIONS = gemm.OVERRIDES | elementwise.OVERRIDES | attention.OVERRIDES

# The other spellings of an operator: what writes into `out`, and what writes into its own argument.
OUT_FORMS = {f"{name}.out": name for name in FUNCTIONS if "." not in name and "flash" not in name}
OUT_FORMS["mean.out"] = "mean.dim"
INPLACE_FORMS = {f"{name}_": name for name in ("addmm", "baddbmm", "silu", "sigmoid", "rsqrt")}

OPERATORS = (*FUNCTIONS, *OUT_FORMS, *INPLACE_FORMS)


def install(backend: Backend) -> Uninstall:
    """Override `OPERATORS` on the CPU key; call what it returns to restore what was found.

    Raises:
        PinError: the backend does not run here (no compiler, or its self-test fails).
    """
    backend.prepare()
    overrides = _overrides(backend)
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*\n?.*Overriding a previously", category=UserWarning)
            for name, override in overrides.items():
                library.impl(name, override, "CPU", with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    return library._destroy


def _overrides(backend: Backend) -> dict[str, Callable]:
    """Every override, each holding the stock kernel; made before the first one is installed."""
    stock = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in FUNCTIONS}
    functions = {name: partial(function, backend, stock[name]) for name, function in FUNCTIONS.items()}
    outs = {name: partial(_into_out, functions[function]) for name, function in OUT_FORMS.items()}
    inplace = {name: partial(_into_self, functions[function]) for name, function in INPLACE_FORMS.items()}
    return functions | outs | inplace


def _into_out(function: Callable, keyset, *args, out: Tensor, **kwargs) -> Tensor:
    result = function(keyset, *args, **kwargs)
    return out.resize_(result.shape).copy_(result)


def _into_self(function: Callable, keyset, x: Tensor, *args, **kwargs) -> Tensor:
    return x.copy_(function(keyset, x, *args, **kwargs))
