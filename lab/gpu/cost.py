"""What do pinned kernels cost against stock kernels, and what can the device do at most?

A kernel is timed stock, pinned, stock, to show the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F

from lab.gpu import qwen3
from lab.gpu.attention import prefill
from lab.gpu.kernels import installed
from lab.gpu.machine import Call, Cuda
from lab.gpu.plan import CONTRACT, Plan
from lab.gpu.receipt import Result
from true_on_policy.kernels import deep_gemm, flash_attention, gpu
from true_on_policy.kernels.probes import Product, drawing

MODE, GEMM, SPLIT = "Megatron-core's mode", "DeepGEMM", "FA3, one split"


@dataclass(frozen=True)
class Case:
    """A case is one kernel at one shape.

    make: returns the call for stock kernels and the call inside a pin; it runs late, to save memory.
    """

    kernel: str
    pinned_by: str
    shape: str
    make: Callable[[], tuple[Call, Call]]


def cost(plan: Plan, machine: Cuda) -> Iterator[Result]:
    yield _result("Kernels", machine, _kernels(plan, machine))
    yield _result("Attention", machine, _attention(plan, machine))
    yield _result(
        "A model",
        machine,
        _model(plan, machine),
        f"{plan.timed_model.layers} layers of Qwen3-4B's widths and its LM head. The training step's attention is "
        "SDPA, forward and backward, on both sides: fa3-fwd has no backward.",
    )
    by_deep_gemm = (_products(rows, machine, GEMM, deep_gemm.product) for rows in plan.timed_rows)
    yield _result("DeepGEMM", machine, chain.from_iterable(by_deep_gemm))


def _result(title: str, machine: Cuda, cases: Iterator[Case], note: str = "") -> Result:
    columns = ("kernel", "pinned by", "shape", "stock ms", "again ms", "pinned ms", "pinned / stock")
    return Result(f"Cost: {title}", columns, tuple(_timed(machine, case) for case in cases), note=note)


def _timed(machine: Cuda, case: Case) -> tuple[Any, ...]:
    stock, pinned = case.make()
    first = machine.milliseconds(stock)
    with installed():
        took = machine.milliseconds(pinned)
    again = machine.milliseconds(stock)
    return case.kernel, case.pinned_by, case.shape, first, again, took, 2 * took / (first + again)


def _kernels(plan: Plan, machine: Cuda) -> Iterator[Case]:
    draw, shapes = drawing(CONTRACT.dtype, machine.device), gpu.shapes(CONTRACT)
    for rows in plan.timed_rows:
        yield from _products(rows, machine, MODE, F.linear)
        for width in shapes.hidden:
            yield Case("RMSNorm", MODE, f"{rows} x {width}", lambda r=rows, w=width: _both(_norm, draw(r, w)))
        width = plan.size.vocab_size
        yield Case(
            *("log_softmax, float32", MODE, f"{rows} x {width}"),
            lambda r=rows, w=width: _both(lambda x: x.log_softmax(-1), draw(r, w).float()),
        )


def _products(rows: int, machine: Cuda, pinned_by: str, pinned: Product) -> Iterator[Case]:
    """Yield the model's products: by aten on stock kernels, and inside a pin by `pinned`."""
    draw = drawing(CONTRACT.dtype, machine.device)

    def make(inner: int, outer: int) -> tuple[Call, Call]:
        weight, x = draw(outer, inner), draw(rows, inner)
        return lambda: F.linear(x, weight), lambda: pinned(x, weight)

    for shape in gpu.shapes(CONTRACT).linear:
        yield Case("linear", pinned_by, " x ".join(map(str, (rows, *shape))), partial(make, *shape))


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Normalize as Hugging Face's RMSNorm does, without the weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _both(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> tuple[Call, Call]:
    call = lambda: function(x)  # noqa: E731
    return call, call


def _attention(plan: Plan, machine: Cuda) -> Iterator[Case]:
    count, length, decoding, cached = plan.attention
    for heads, groups, width in gpu.shapes(CONTRACT).attention:
        draw = drawing(CONTRACT.dtype, machine.device)
        each = (heads, groups, groups)
        yield Case(
            *("prefill; stock is SDPA", SPLIT, f"{count} x {length}"),
            lambda draw=draw, each=each, width=width: _prefill([draw(count, length, n, width) for n in each]),
        )
        yield Case(
            *("decode; stock is FA3's own splits", SPLIT, f"{decoding} x 1 of {cached}"),
            lambda draw=draw, each=each, width=width: _decode(
                draw(decoding, 1, each[0], width), *(draw(decoding, cached, n, width) for n in each[1:])
            ),
        )


def _prefill(parts: list[torch.Tensor]) -> tuple[Call, Call]:
    library = flash_attention.library()
    query, key, value = (x.transpose(1, 2) for x in parts)
    stock = lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)  # noqa: E731
    return stock, lambda: prefill(library, *parts)


def _decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Call, Call]:
    library = flash_attention.library()
    seen = torch.full((len(key),), key.shape[1], dtype=torch.int32, device=key.device)
    # The function is looked up at each call, because a pin replaces it.
    call = lambda: library.flash_attn_with_kvcache(query, key, value, cache_seqlens=seen, causal=True)  # noqa: E731
    return call, call


def _model(plan: Plan, machine: Cuda) -> Iterator[Case]:
    count, length = plan.batch
    tokens = torch.randint(plan.timed_model.vocab, (count, length), device=machine.device)
    by_sdpa, by_fa3 = (qwen3.build(plan.timed_model, machine, name) for name in ("sdpa", qwen3.FA3))
    batch = f"{count} x {length} tokens"
    forward = torch.no_grad()(qwen3.log_probs)
    yield Case(
        *("log-prob forward; stock is SDPA", f"{MODE}; {SPLIT}", batch),
        lambda: (lambda: forward(by_sdpa, tokens), lambda: forward(by_fa3, tokens)),
    )

    def step() -> None:
        by_sdpa.zero_grad()
        qwen3.log_probs(by_sdpa, tokens).sum().backward()

    yield Case("training step; attention is SDPA", MODE, batch, lambda: (step, step))


def ceilings(plan: Plan, machine: Cuda) -> Iterator[Result]:
    """A copy and a product, with which other figures can be compared."""
    source = torch.randn(plan.copied // 4, device=machine.device)
    target = torch.empty_like(source)
    copy = machine.milliseconds(lambda: target.copy_(source))
    x, y = (torch.randn(plan.product, plan.product, device=machine.device).bfloat16() for _ in range(2))
    product = machine.milliseconds(lambda: x @ y)
    yield Result(
        "Ceilings",
        ("what", "size", "ms", "rate", "unit"),
        (
            ("copy, bytes read and written", 2 * plan.copied, copy, 2 * plan.copied / copy / 1e9, "TB/s"),
            ("bf16 product", plan.product, product, 2 * plan.product**3 / product / 1e9, "TFLOP/s"),
        ),
    )
