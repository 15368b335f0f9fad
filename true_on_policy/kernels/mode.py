"""Switch on a copy of thinking-machines' batch_invariant_ops, check it in the dispatcher, and undo it.

Every copy overrides aten operators on the accelerator's dispatch key for the whole process, and keeps a flag.
The flag of the original and of SGLang's copy can be wrong: a nested `set_batch_invariant_mode` removes the
overrides when it ends, and leaves the flag on. Two copies in one process override each other.
"""

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from true_on_policy.errors import PinError
from true_on_policy.kernels.provider import Undo, imported, undone_on_error

# Since 2.13 the CUDA builds of torch override some operators in Python from this folder: these kernels are stock.
OWN = Path(torch.__file__).parent / "_native"


def accelerator_key() -> str:
    """Name the dispatch key that batch-invariant modes override: the accelerator's, or CPU where torch has none."""
    return getattr(torch.accelerator.current_accelerator(), "type", "cpu").upper()


def registration(operator: str, key: str) -> str:
    """Return the dispatcher's line on the kernel of aten::`operator` at `key`; empty where none is registered."""
    lines = torch._C._dispatch_dump(f"aten::{operator}").splitlines()
    return next((line for line in lines if line.startswith(f"{key}:")), "")


def holder(operator: str, key: str) -> str | None:
    """Return the Python file that overrides an operator; None where the kernel is torch's own, in C++ or Python."""
    match = re.search(r"registered at (.+\.py):\d+", registration(operator, key))
    return None if match is None or OWN in Path(match[1]).parents else match[1]


def described(operator: str, key: str) -> str:
    """Describe the kernel that serves an operator: `stock`, or the file of the override and its package."""
    file = holder(operator, key)
    if file is None:
        return "stock"
    files = ((name, getattr(module, "__dict__", {}).get("__file__")) for name, module in [*sys.modules.items()])
    module = next((name for name, own in files if own == file), None)
    return f"{Path(file).name} of {module.partition('.')[0] if module else Path(file).parent.name}"


# The operators that at least one copy overrides.
OVERRIDABLE = ("mm", "mm.out", "mm.dtype", "addmm", "bmm", "_log_softmax", "mean.dim", "rms_norm")
# The operators that every version of every copy overrides: a mode that is on holds all of them.
SHARED = ("mm", "addmm", "_log_softmax", "mean.dim")


@dataclass(frozen=True)
class Mode:
    """A mode is one library's copy of batch_invariant_ops."""

    library: str  # its name in errors
    module: str  # registers the overrides, holds the flag, and has the functions that turn it

    @property
    def file(self) -> str:
        """The file of the overrides, as `described` says it."""
        return f"{self.module.rpartition('.')[2]}.py of {self.module.partition('.')[0]}"


def settings(mode: Mode) -> dict[str, str]:
    """Read the mode's flag, and which kernel serves each shared operator; no library is imported for this."""
    module, key = sys.modules.get(mode.module), accelerator_key()
    flag = module is not None and module.is_batch_invariant_mode_enabled()
    return {
        "batch-invariant flag": "on" if flag else "off",
        **{f"aten::{name}": described(name, key) for name in SHARED},
    }


def load(mode: Mode) -> ModuleType:
    """Import the library's copy of batch_invariant_ops; raises PinError where it cannot be imported."""
    return imported(mode.module, mode.library)


def switch_on(mode: Mode, enable: Callable[[], None], disable: Callable[[], None]) -> Undo:
    """Enable the mode, check that its overrides stand, and return a function that disables the mode.

    A mode that was on before the call, with all its overrides in place, stays on after the undo.

    Raises:
        PinError: another copy holds an operator, the flag and the dispatcher contradict each other, or the
            library failed or enabled only a part of the mode, which is then undone.
    """
    module, key = load(mode), accelerator_key()
    holders = _holders(key)
    for name, file in holders.items():
        if file not in (None, module.__file__):
            raise PinError(
                f"{mode.library}: aten::{name} is overridden already by {file}. Two batch-invariant modes in one "
                "process override each other: leave the first before you pin"
            )
    held, flag = [name for name in SHARED if holders[name]], module.is_batch_invariant_mode_enabled()
    if flag and len(held) == len(SHARED):
        return lambda: None
    if flag or held:
        runs = ", ".join(f"aten::{name} runs {described(name, key)}" for name in SHARED)
        raise PinError(
            f"{mode.library}: the flag of the mode says {'on' if flag else 'off'}, but {runs}. A nested "
            f"set_batch_invariant_mode leaves the flag so: call {mode.module}.disable_batch_invariant_mode() before "
            "you pin"
        )
    undo = partial(_switch_off, mode, disable, holders, key)
    with undone_on_error(undo, f"{mode.library}: the batch-invariant mode cannot be enabled"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*\n?.*Overriding a previously", category=UserWarning)
            enable()
        _check(module, key)
    return undo


def _holders(key: str) -> dict[str, str | None]:
    return {name: holder(name, key) for name in OVERRIDABLE}


def _check(module: ModuleType, key: str) -> None:
    if not module.is_batch_invariant_mode_enabled():
        raise RuntimeError("the flag of the mode stays off")
    for name in SHARED:
        if holder(name, key) != module.__file__:
            raise RuntimeError(f"aten::{name} runs {described(name, key)} on {key}")


def _switch_off(mode: Mode, disable: Callable[[], None], holders: dict[str, str | None], key: str) -> None:
    disable()
    for name, file in _holders(key).items():
        if file != holders[name]:
            raise PinError(f"{mode.library}: undoing the mode leaves aten::{name} to {file or 'the stock kernel'}")
