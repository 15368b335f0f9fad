"""Our plugin inside SGLang's processes, which SGLang finds by its entry point group `sglang.srt.plugins`.

SGLang calls `activate` early in each process and applies the hooks that `activate` registers. Without our variables in
the environment `activate` does nothing, so an SGLang that shares our environment is left alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from true_on_policy.engines.handover import FOLDER, asked_for, ordered_norm, pin_as_asked, stated_contract

if TYPE_CHECKING:
    from true_on_policy.contract.cpu import Contract


def activate() -> None:
    """Register the hooks that the contract needs; SGLang calls this function and hides what a plugin raises."""
    if FOLDER in os.environ:
        _look()
    if asked_for():
        _align()


def _look() -> None:
    """Register the hook that writes the engine's dump for the doctor."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    from true_on_policy.engines.sglang_settings import TARGET, written

    HookRegistry.register(TARGET, written, HookType.AFTER)


def _align() -> None:
    """Register the hooks that replace SGLang's kernels and orders by those of the CPU contract."""
    from sglang.srt.arg_groups import choices  # pyright: ignore[reportMissingImports]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    # On invariant kernels torch's SDPA is as deterministic as the backends that SGLang lists, even with a prefix from
    # the cache.
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", _pin, HookType.REPLACE
    )
    contract = stated_contract()
    if contract.leaves > 1:
        HookRegistry.register(
            "sglang.srt.layers.linear.RowParallelLinear.forward", _row_parallel(contract), HookType.REPLACE
        )
    HookRegistry.register(
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding._compute_inv_freq",
        _frequencies_on_cpu,
        HookType.AROUND,
    )
    if ordered_norm():
        HookRegistry.register("sglang.srt.layers.layernorm.RMSNorm.forward_native", _norm(), HookType.REPLACE)


def _pin(enable_bmm: bool = True) -> None:
    """Pin the CPU kernels where SGLang would switch on its Triton kernels, which need a GPU."""
    pin_as_asked()


def _frequencies_on_cpu(compute, self, base):
    """Keep rope's frequencies on the CPU: with `--rl-on-policy-target` SGLang would move them to a GPU."""
    native, self._force_native = self._force_native, False
    try:
        return compute(self, base)
    finally:
        self._force_native = native


def _norm():
    """Build SGLang's RMSNorm in the order of rounding that was handed over."""
    ordered = ordered_norm()
    assert ordered is not None

    def forward(self, x, residual=None, post_residual_addition=None, quant_linear=None):
        assert post_residual_addition is None and quant_linear is None, "no such path in Qwen3"
        return ordered(self, x, residual)

    return forward


def _row_parallel(contract: Contract):
    """Build the forward of SGLang's row-parallel layers, whose sums over K are trees that the ranks share."""
    import torch

    from true_on_policy.kernels.row_parallel import agreed_tree

    tree = agreed_tree(contract)
    assert tree is not None

    def forward(self, input_, skip_all_reduce=False, forward_batch=None, output_tensor=None):
        assert self.input_is_parallel and self.bias is None and output_tensor is None, "no such path in Qwen3"
        total = tree.product(input_, self.weight, self.tp_group and self.tp_group.device_group)
        # Where SGLang adds up over the ranks later, rank 0 gives the sum and the other ranks give zeros.
        alone = self.reduce_results or not self.tp_group or self.tp_group.rank_in_group == 0
        return total if alone else torch.zeros_like(total), None

    return forward
