"""Do a row's bits depend on its company? Stock, pinned and DeepGEMM's kernels at the model's shapes, by bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F

from lab.gpu.machine import Cuda
from lab.gpu.plan import CONTRACT, Plan
from lab.gpu.receipt import Result
from true_on_policy.errors import ProbeError
from true_on_policy.kernels import deep_gemm, gpu
from true_on_policy.kernels.pin import pinned
from true_on_policy.kernels.probes import COLUMNS, Failure, Kernel, compare, drawing, in_company

Case = tuple[str, tuple[int, ...], Kernel, torch.Tensor]
Row = tuple[str, str, int, int, str]
COLUMN_NAMES = ("kernel", "shape", "comparisons", "equal", "first difference")


@contextmanager
def installed() -> Iterator[None]:
    """Run the body on the contract's kernels, without the probes of `pinned`, which have their own section."""
    with ExitStack() as stack:
        stack.callback(gpu.install(CONTRACT))
        yield


def warm(plan: Plan, machine: Cuda) -> None:
    """Compile DeepGEMM's kernels: multiply once by every product of the sections `kernels` and `cost`.

    A first call compiles for seconds, and leaves the kernel in a cache on disk, where later sections find it.
    """
    if deep_gemm.version() is None:
        return
    draw = drawing(CONTRACT.dtype, machine.device)
    for inner, outer in gpu.shapes(CONTRACT).linear:
        for columns in {min(outer, COLUMNS), outer}:
            weight = draw(columns, inner)
            for rows in {*plan.rows, *plan.timed_rows}:
                deep_gemm.product(draw(rows, inner), weight)


def kernels(plan: Plan, machine: Cuda) -> Iterator[Result]:
    rows = lambda: (_row(*case, plan.rows) for case in _cases(plan, machine, F.linear))  # noqa: E731
    yield _result("Stock kernels", rows(), demanded=False)
    with installed():
        yield _result("Pinned: Megatron-core's mode", rows())
    yield from _contract()
    products = (case for case in _cases(plan, machine, deep_gemm.product) if case[0] == "linear")
    yield _result("Pinned: DeepGEMM", (_row(*case, plan.rows) for case in products))
    with installed():
        yield _result(
            "Pinned aten::mm and DeepGEMM, one product by two kernels",
            _agreement(plan, machine),
            demanded=False,
            note="Demanded of a contract only where the engine runs DeepGEMM and the trainer does not.",
        )


def _contract() -> Iterator[Result]:
    """Pin as a trainer's init hook does, with all providers and every probe, and report what is in force."""
    title, columns = "The pin and its own probes", ("setting", "in force")
    try:
        with pinned(CONTRACT):
            observed = gpu.observe(CONTRACT)
    except ProbeError as error:
        yield Result(title, ("setting", "first difference"), (("probe", str(error)),), False)
    else:
        yield Result(title, columns, tuple(observed.items()), True)


def _result(title: str, rows: Iterable[Row], demanded: bool = True, note: str = "") -> Result:
    listed = tuple(rows)
    equal = all(row[2] == row[3] for row in listed)
    control = "" if demanded else "A control: nothing is demanded of it. "
    return Result(title, COLUMN_NAMES, listed, equal if demanded else None, note or control)


def _row(kernel: str, shape: tuple[int, ...], function: Kernel, x: torch.Tensor, sizes: tuple[int, ...]) -> Row:
    found = list(in_company(kernel, shape, function, x, sizes))
    asked = 1 + sum(size < len(x) for size in sizes)
    return kernel, _times(shape), asked, asked - len(found), _first(found)


def _cases(plan: Plan, machine: Cuda, product) -> Iterator[Case]:
    """Yield every kernel that a batch-invariant mode replaces, as models call it, with the largest batch."""
    draw, shapes, most = drawing(CONTRACT.dtype, machine.device), gpu.shapes(CONTRACT), plan.rows[-1]
    for inner, outer in shapes.linear:
        weight = draw(min(outer, COLUMNS), inner)
        yield "linear", (inner, len(weight)), lambda x, weight=weight: product(x, weight), draw(most, inner)
    for width in shapes.hidden:
        yield "mean", (width,), lambda x: x.float().pow(2).mean(-1, keepdim=True), draw(most, width)
    width = max(outer for _, outer in shapes.linear)
    # Fewer rows, to fit into memory: two batches in float32 are held at once.
    yield "log_softmax", (width,), lambda x: x.float().log_softmax(-1), draw(min(most, 1024), width)


def _agreement(plan: Plan, machine: Cuda) -> Iterator[Row]:
    draw = drawing(CONTRACT.dtype, machine.device)
    for inner, outer in gpu.shapes(CONTRACT).linear:
        weight, x = draw(min(outer, COLUMNS), inner), draw(plan.rows[-1], inner)
        shape = inner, len(weight)
        found = [
            failure
            for size in plan.rows
            for failure in compare(
                *("linear", shape, f"{size} rows"), *(F.linear(x[:size], weight), deep_gemm.product(x[:size], weight))
            )
        ]
        yield "linear", _times(shape), len(plan.rows), len(plan.rows) - len(found), _first(found)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _first(found: list[Failure]) -> str:
    return f"{found[0].company}: {found[0].mismatch}" if found else ""
