"""A trainer whose kernels depend on the batch, planted for `--custom-megatron-init-path`."""

from __future__ import annotations

from functools import wraps
from typing import Any

MANY = 128
"""A number of tokens: most micro-batches of a tiny run hold more, and most halves of them hold fewer."""


def init(args: Any) -> None:
    """Round differently above MANY tokens in a micro-batch: triple the input, divide the product by three.

    In exact arithmetic nothing changes, as where a kernel adds up in another order.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    plain = ColumnParallelLinear.forward

    @wraps(plain)
    def forward(self: Any, input_: Any, *more: Any, **named: Any) -> Any:
        if input_.shape[0] * input_.shape[1] <= MANY:
            return plain(self, input_, *more, **named)
        output, bias = plain(self, input_ * 3, *more, **named)
        return output / 3, bias

    ColumnParallelLinear.forward = forward
