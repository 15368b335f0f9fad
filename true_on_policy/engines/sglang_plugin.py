"""Our plugin inside SGLang's processes, by its own entry point group `sglang.srt.plugins`.

SGLang calls `activate` early in each process and applies the hooks that it registered. Without a contract in the
environment it does nothing, so an SGLang that shares our environment is left alone. This module is read by both sides:
it imports neither SGLang nor the kernels before it is asked to.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from true_on_policy.contract import Contract

CONTRACT = "TRUE_ON_POLICY_CONTRACT"  # JSON of Contract: what our launcher asks for
ORDER = "TRUE_ON_POLICY_NORM_ORDER"  # JSON of NormOrder, where the engine follows the trainer
ACTIVE = "true_on_policy: pinned"  # printed by the process that runs the model, once its probes held


def activate() -> None:
    """Register what the contract needs. Called by SGLang, which survives and hides what a plugin raises."""
    if CONTRACT not in os.environ:
        return
    from sglang.srt.arg_groups import choices  # pyright: ignore[reportMissingImports]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    # With invariant kernels under it, torch's SDPA is as deterministic as the backends that SGLang lists, with a
    # prefix from the cache too.
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", _pin, HookType.REPLACE
    )
    contract = _contract()
    if contract.leaves > 1:
        HookRegistry.register(
            "sglang.srt.layers.linear.RowParallelLinear.forward", _row_parallel(contract), HookType.REPLACE
        )
    if ORDER in os.environ:
        HookRegistry.register("sglang.srt.layers.layernorm.RMSNorm.forward_native", _norm(), HookType.REPLACE)


def _pin(enable_bmm: bool = True) -> None:
    """In place of SGLang's Triton kernels, which need a GPU. An error here ends the server with its message."""
    from true_on_policy.pin import pin

    contract = _contract()
    pin(contract)
    print(ACTIVE, contract.backend, flush=True)


def _contract() -> Contract:
    from true_on_policy.contract import Contract, Shapes

    stated = json.loads(os.environ[CONTRACT])
    shapes = Shapes(**{name: _tuples(value) for name, value in stated.pop("shapes").items()})
    return Contract(**stated, shapes=shapes)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _norm():
    """SGLang's RMSNorm in the trainer's order of rounding."""
    from true_on_policy.norm_order import NormOrder, add_residual, rms_norm

    order = NormOrder(**json.loads(os.environ[ORDER]))

    def forward(self, x, residual=None, post_residual_addition=None, quant_linear=None):
        assert post_residual_addition is None and quant_linear is None, "no such path in Qwen3"
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon, order)
        stream = add_residual(x, residual, order)
        return rms_norm(stream, self.weight, self.variance_epsilon, order), stream.to(x.dtype)

    return forward


def _row_parallel(contract: Contract):
    """SGLang's row-parallel layers, their sums over K as trees that its tensor-parallel ranks share."""
    import torch

    from true_on_policy.kernels.row_parallel import agreed_tree

    tree = agreed_tree(contract)
    assert tree is not None

    def forward(self, input_, skip_all_reduce=False, forward_batch=None, output_tensor=None):
        assert self.input_is_parallel and self.bias is None and output_tensor is None, "no such path in Qwen3"
        total = tree.product(input_, self.weight, self.tp_group and self.tp_group.device_group)
        # Where SGLang adds up over the ranks later, one rank's sum meets zeros.
        alone = self.reduce_results or not self.tp_group or self.tp_group.rank_in_group == 0
        return total if alone else torch.zeros_like(total), None

    return forward
