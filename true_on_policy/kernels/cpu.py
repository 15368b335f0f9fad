"""Batch-invariant kernels on the CPU dispatch key, below autograd, and one way to install them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from true_on_policy.kernels.native import NATIVE, Native
from true_on_policy.kernels.overrides import OVERRIDES

Uninstall = Callable[[], None]


# By the `backend` of a Contract.
BACKENDS: dict[str, Native] = {NATIVE.name: NATIVE}

# Other spellings of an operator: the form that writes into `out`, and the form that writes into its first argument.
OUT_FORMS = {f"{name}.out": name for name in OVERRIDES if "." not in name and "flash" not in name}
OUT_FORMS["mean.out"] = "mean.dim"
INPLACE_FORMS = {f"{name}_": name for name in ("addmm", "baddbmm", "silu", "sigmoid", "rsqrt")}

OPERATORS = (*OVERRIDES, *OUT_FORMS, *INPLACE_FORMS)


def install(backend: Native) -> Uninstall:
    """Override `OPERATORS` on the CPU key, and return a function that restores the previous kernels.

    Raises:
        PinError: the backend does not run here: there is no compiler, or its self-test fails.
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


def _overrides(backend: Native) -> dict[str, Callable]:
    """Build every override around its stock kernel, before the first override is installed."""
    stock = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in OVERRIDES}
    functions = {name: partial(function, backend, stock[name]) for name, function in OVERRIDES.items()}
    outs = {name: partial(_into_out, functions[function]) for name, function in OUT_FORMS.items()}
    inplace = {name: partial(_into_self, functions[function]) for name, function in INPLACE_FORMS.items()}
    return functions | outs | inplace


def _into_out(function: Callable, keyset, *args, out: Tensor, **kwargs) -> Tensor:
    result = function(keyset, *args, **kwargs)
    return out.resize_(result.shape).copy_(result)


def _into_self(function: Callable, keyset, x: Tensor, *args, **kwargs) -> Tensor:
    return x.copy_(function(keyset, x, *args, **kwargs))
