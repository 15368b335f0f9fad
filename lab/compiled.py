"""Which operation of a decoder does torch.compile change first, beside the contract's pinned kernels?

    python -m lab.compiled                 every operation in fp32 and bf16: some minutes on one core

Each operation of one layer of a tiny Qwen3 runs on random rows, eagerly and compiled by inductor, with pinned kernels.
Two questions, answered by bytes: is the compiled row the eager one, and is it alone the row that it is in a batch?
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.compiled:main", extra="verify")

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.provenance import as_markdown, markdown_table, parser_of, provenance, target
from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import ORDERS, add_residual, rms_norm
from true_on_policy.kernels.pin import pinned

ROWS, HIDDEN, HEAD = 13, 128, 32
ORDER = ORDERS["sglang"]
HEADINGS = ("dtype", "operation", "compiled == eager", "compiled: alone == in a batch")


@dataclass(frozen=True)
class Answer:
    """What compiling one operation does to its rows: how many keep their bits, or why it does not run."""

    dtype: str
    operation: str
    as_eager: str
    as_alone: str


def operations(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Operations in the order of a forward pass, each with its arguments, whose first dimension is the row."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    rows, other, weight, square = draw(ROWS, HIDDEN), draw(ROWS, HIDDEN), draw(HIDDEN), draw(HIDDEN, HIDDEN)
    turn = torch.rand(ROWS, HEAD, generator=random) * 6
    return {
        "RMSNorm": (lambda x: rms_norm(x, weight, 1e-6, ORDER), (rows,)),
        "linear": (lambda x: F.linear(x, square), (rows,)),
        "RoPE": (rotated, (draw(ROWS, HEAD), turn)),
        "attention": (attended, (draw(ROWS, 4, 24, HEAD), draw(ROWS, 4, 24, HEAD), draw(ROWS, 4, 24, HEAD))),
        "residual": (lambda x, y: add_residual(x, y, ORDER), (rows, other)),
        "SwiGLU": (lambda x, y: F.silu(x) * y, (rows, other)),
        "log-softmax": (lambda x: F.log_softmax(x.float(), -1), (draw(ROWS, 320),)),
    }


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    return x * cos + torch.cat([-right, left], -1) * sin


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def answers(dtype: str) -> Iterator[Answer]:
    for name, (function, arguments) in operations(DTYPES[dtype]).items():
        print(f"{dtype} {name}", file=sys.stderr)
        torch.compiler.reset()
        try:
            yield Answer(dtype, name, *compared(function, torch.compile(function, dynamic=True), arguments))
        except AssertionError as error:  # inductor's check of what an operator returned
            yield Answer(dtype, name, f"does not run: {str(error).splitlines()[0]}", "-")


def compared(eager: Callable, compiled: Callable, arguments: tuple[Tensor, ...]) -> tuple[str, str]:
    """Count the compiled rows that equal the eager rows, and the rows that are equal alone and in a batch."""
    together = compiled(*arguments)
    alone = [compiled(*(one[row : row + 1] for one in arguments)) for row in range(ROWS)]
    pairs = (together, eager(*arguments)), (torch.cat(alone), together)
    as_eager, as_alone = (f"{equal_rows(*pair)} of {ROWS}" for pair in pairs)
    return as_eager, as_alone


def equal_rows(found: Tensor, wanted: Tensor) -> int:
    return sum(equal_bits(one, other) for one, other in zip(found, wanted, strict=True))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--page", type=target, default=Path("lab/results/compiled.md"))
    options = parser.parse_args()
    found = []
    for dtype in options.dtypes:
        with pinned(Contract(dtype=dtype)), torch.no_grad():
            found += answers(dtype)
    table = markdown_table(HEADINGS, map(astuple, found))
    text = f"# What torch.compile changes\n\n{table}\n{as_markdown(provenance())}"
    options.page.write_text(text, encoding="utf-8")
    print(text)
    return 0
