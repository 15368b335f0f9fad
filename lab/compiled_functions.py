"""torch.compile beside a contract: which functions keep their bits when they are compiled, tried here and now.

A contract switches torch.compile off on both sides, because a compiled function may round elsewhere. `tried` compiles
each function of a decoder's layer and compares it with its eager self by bytes. `compiled_where_equal` puts the
functions that are equal in the place of the eager ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from true_on_policy.bitwise import first_mismatch
from true_on_policy.contract.cpu import Shapes
from true_on_policy.contract.rounding import add_residual, chosen, combined, rms_norm, rotated
from true_on_policy.contract.specs import NormOrder
from true_on_policy.kernels.probes import drawing
from true_on_policy.kernels.provider import replace_everywhere

ROWS = (64, 1, 2, 5000)
"""Rows of a call: several, one, which inductor compiles by itself, and more than one loop of inductor's sums takes."""
ROUNDS = {"emulate_precision_casts": True}  # inductor rounds between fused operations, as eager code does
MOST_GRAPHS = 64  # that one function may need: widths, dtypes, ROWS, with a gradient and without
EPSILON = 1e-6
ORDERED = (rms_norm, add_residual, chosen, combined)
"""Functions of a contract that trainers call by name, so that a compiled one can take their place."""
Function = Callable[..., Any]


@dataclass(frozen=True)
class Tried:
    """One function, compiled at one shape of a model.

    function: its name.
    shape: the widths of its rows, and the dtype of the first.
    differs: where its result differs from the eager one's first, or why it does not run; None where all bits agree.
    gradient_differs: whether a gradient has other bits; log-probs do not depend on it.
    """

    function: str
    shape: str
    differs: str | None
    gradient_differs: bool = False


@dataclass(frozen=True)
class _Case:
    """A function, tensors that it reads row by row, its weights, and its further arguments."""

    function: Function
    rows: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    more: tuple[Any, ...] = ()

    @property
    def shape(self) -> str:
        return f"{' '.join(str(x.shape[-1]) for x in self.rows)} {str(self.rows[0].dtype)[6:]}"

    def outcome(self, function: Function, rows: int, graph: bool) -> tuple[list[Tensor], list[Tensor]]:
        """What `function` makes of the first `rows`; with a `graph` also the gradients of rows and weights."""
        parts = (*(x[:rows] for x in self.rows), *self.weights)
        given = [x.clone().requires_grad_(graph and x.is_floating_point()) for x in parts]
        with torch.set_grad_enabled(graph):
            made = function(*given, *self.more)
            results = list(made) if isinstance(made, tuple) else [made]
            if graph:
                results[0].float().square().sum().backward()
        return [x.detach() for x in results], [x.grad for x in given if x.grad is not None]


def tried(dtype: str, shapes: Shapes, order: NormOrder, device: torch.device) -> Iterator[Tried]:
    """Try each function of a layer at the shapes of a model; call it with the contract's kernels pinned.

    Args:
        dtype: of the contract, "fp32" or "bf16".
        order: in which both sides round and add.
    """
    for case in _cases(dtype, shapes, order, device):
        yield _tried(case)


def _cases(dtype: str, shapes: Shapes, order: NormOrder, device: torch.device) -> Iterator[_Case]:
    draw, rows = drawing(dtype, device), max(ROWS)
    for width in shapes.hidden:
        yield _Case(rms_norm, (draw(rows, width),), (draw(width),), (EPSILON, order))
    branch = draw(rows, shapes.hidden[0])
    yield _Case(add_residual, (branch, branch.flip(0)), more=(order,))
    if dtype != "fp32" and not order.rounds_sum:  # the stream stays in float32
        stream = branch.flip(0).float() + draw(*branch.shape).float()  # more bits than the dtype holds
        yield _Case(rms_norm, (stream,), (draw(stream.shape[-1]),), (EPSILON, order))
        yield _Case(add_residual, (branch, stream), more=(order,))
    for *_, width in shapes.attention:
        yield _Case(rotated, (draw(rows, width), draw(rows, width).float()))
    for width in shapes.activated:
        yield _Case(gated, (draw(rows, width), draw(rows, width)))
    for experts, top_k, width in shapes.chosen:
        yield _Case(chosen, (draw(rows, experts),), more=(top_k,))
        places = torch.arange(rows, device=device)[:, None].expand(-1, top_k).contiguous()
        shares = draw(rows, top_k).float()
        yield _Case(weighted, (places, shares), (draw(rows, width),))
    for inner, outer in shapes.linear:
        yield _Case(F.linear, (draw(rows, inner),), (draw(outer, inner),))
    yield _Case(log_softmax, (draw(rows, max(outer for _, outer in shapes.linear)),))


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def weighted(places: Tensor, shares: Tensor, outputs: Tensor) -> Tensor:
    return combined(outputs, places, shares)


def log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def _tried(case: _Case) -> Tried:
    name = "combined" if case.function is weighted else case.function.__name__
    torch.compiler.reset()
    try:
        with switched_on():
            fast, compilations = _compile(case.function)
            differs, gradient_differs = _compared(case, fast)
    except Exception as error:  # whatever a compiler raises: the function then stays eager
        return Tried(name, case.shape, f"does not run: {type(error).__name__}: {str(error).splitlines()[0]}")
    if not compilations:
        return Tried(name, case.shape, "nothing was compiled")
    return Tried(name, case.shape, differs, gradient_differs)


def _compile(function: Function) -> tuple[Function, list[Any]]:
    """The compiled function, and a list that grows with each graph that inductor really compiles for it."""
    from torch._inductor.compile_fx import compile_fx

    graphs: list[Any] = []

    def inductor(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return compile_fx(graph, inputs, config_patches=ROUNDS)

    return torch.compile(function, backend=inductor, dynamic=True, fullgraph=True), graphs


def _compared(case: _Case, fast: Function) -> tuple[str | None, bool]:
    differs, gradient_differs = None, False
    for graph in (False, True):
        for rows in ROWS:
            (ours, slopes), (theirs, others) = (case.outcome(f, rows, graph) for f in (fast, case.function))
            found = (first_mismatch(a, b) for a, b in zip(ours, theirs, strict=True))
            first = next(filter(None, found), None)
            differs = differs or (first and f"{rows} rows{' with a gradient' * graph}: {first}")
            gradient_differs |= any(first_mismatch(a, b) is not None for a, b in zip(slopes, others, strict=True))
    return differs, gradient_differs


@contextmanager
def compiled_where_equal(found: list[Tried]) -> Iterator[tuple[str, ...]]:
    """Run the body with those of `ORDERED` compiled that `tried` found equal at each shape; yields their names.

    A function is compiled for rows in a matrix, as it was tried, whatever leading dimensions the model has.
    """
    equal = {one.function for one in found} - {one.function for one in found if one.differs is not None}
    kept = {function: _by_rows(function) for function in ORDERED if function.__name__ in equal}
    replace_everywhere(kept)
    try:
        with switched_on():
            yield tuple(function.__name__ for function in kept)
    finally:
        replace_everywhere({fast: function for function, fast in kept.items()})


@contextmanager
def switched_on() -> Iterator[None]:
    """Let torch.compile compile in the body, where TORCH_COMPILE_DISABLE keeps it from it elsewhere."""
    import torch._dynamo

    with torch._dynamo.config.patch(disable=False, recompile_limit=MOST_GRAPHS):
        yield


@cache
def _by_rows(function: Function) -> Function:
    fast, _ = _compile(function)

    def by_rows(*given: Any, **named: Any) -> Any:
        lead = given[0].shape[:-1]
        flat = [x.reshape(-1, x.shape[-1]) if isinstance(x, Tensor) and x.dim() > 2 else x for x in given]
        made = fast(*flat, **named)
        return made.view(*lead, -1) if isinstance(made, Tensor) and len(lead) > 1 else made

    return by_rows
