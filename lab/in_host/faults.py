"""Faults that are planted in a trainer for `--custom-megatron-init-path`: our hooks must tell each by its name."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch.distributed as dist

MANY = 128
"""A number of tokens: most micro-batches of a tiny run hold more, and most halves of them hold fewer."""
LOST = "model.layers.1.mlp.down_proj.weight"


def depends_on_the_batch(args: Any) -> None:
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


def loses_one_weight(args: Any) -> None:
    """Leave one tensor out of each weight update of Miles, beside our proof."""
    _keep(lambda name: name != LOST, args)


def loses_all_weights(args: Any) -> None:
    """Send no weights from Miles, so that the engine keeps those it was started with, beside our proof."""
    _keep(lambda name: False, args)


def _keep(sent: Callable[[str], bool], args: Any) -> None:
    from miles.backends.megatron_utils.update_weight.update_weight_from_distributed import broadcast  # pyright: ignore[reportMissingImports]

    from true_on_policy.hosts import prove_weights

    send = broadcast.update_weights_from_distributed

    def losing(group: str, ranks: Any, version: int, engines: Any, named: list[tuple[str, Any]], **more: Any) -> Any:
        kept = [(name, tensor) for name, tensor in named if sent(name)]
        return send(group, ranks, version, engines, kept, **more) if kept else []

    broadcast.update_weights_from_distributed = losing
    prove_weights(args)


def has_another_config(args: Any) -> None:
    """Give rank 1 a bound of its own, as a file that differs between two machines does."""
    if dist.get_rank() == 1:
        args.mis = copy.deepcopy(args.mis)
        args.mis["weight"]["upper"] = 3.0


def fails(args: Any) -> None:
    """Let the hook of rank 1 fail before it meets other ranks."""

    def failing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("planted on rank 1")

    _on_rank_1(failing)


def never_comes(args: Any) -> None:
    """Let the hook of rank 1 wait for longer than the job's time-out, as a process that hangs does."""
    _on_rank_1(lambda *_, **__: time.sleep(3600))


def _on_rank_1(hook: Callable[..., Any]) -> None:
    from mis_plugins import mis

    if dist.get_rank() == 1:
        mis.compute_mis_weights_with_cp = hook
