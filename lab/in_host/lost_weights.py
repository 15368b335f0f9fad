"""Weight updates of Miles that lose tensors, planted for `--custom-megatron-init-path` beside our proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from true_on_policy.hosts import prove_weights

LOST = "model.layers.1.mlp.down_proj.weight"


def one(args: Any) -> None:
    """Leave one tensor out of each update."""
    _keep(lambda name: name != LOST)
    prove_weights(args)


def all_of_them(args: Any) -> None:
    """Send nothing, so that the engine keeps the weights it was started with."""
    _keep(lambda name: False)
    prove_weights(args)


def _keep(sent: Callable[[str], bool]) -> None:
    from miles.backends.megatron_utils.update_weight.update_weight_from_distributed import broadcast  # pyright: ignore[reportMissingImports]

    send = broadcast.update_weights_from_distributed

    def losing(group: str, ranks: Any, version: int, engines: Any, named: list[tuple[str, Any]], **more: Any) -> Any:
        kept = [(name, tensor) for name, tensor in named if sent(name)]
        return send(group, ranks, version, engines, kept, **more) if kept else []

    broadcast.update_weights_from_distributed = losing
