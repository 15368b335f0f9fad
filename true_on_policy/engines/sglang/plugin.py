"""Our plugin inside SGLang's processes, which SGLang finds by its entry point group `sglang.srt.plugins`.

SGLang calls `activate` early in each process and applies the hooks that `activate` registers. Without our variables in
the environment `activate` does nothing, so an SGLang that shares our environment is left alone.
"""

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from true_on_policy.engines import handover
from true_on_policy.errors import NotSeenError, PinError

if TYPE_CHECKING:
    from true_on_policy.contract.cpu import Contract

ROPE = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding._compute_inv_freq"
ROW_PARALLEL = "sglang.srt.layers.linear.RowParallelLinear.forward"
NORM = "sglang.srt.layers.layernorm.RMSNorm.forward_native"


def activate() -> None:
    """Register the hooks that the environment asks for; SGLang calls `activate` and hides its exceptions."""
    if handover.asked_for():  # first, because an exception below would leave the engine unpinned and running
        _align()
    if handover.is_set(handover.FOLDER):  # for the doctor
        from true_on_policy.engines.sglang.settings import TARGET, written

        _register(TARGET, written, "AFTER")
    if handover.is_set(handover.ASKED):
        _register("sglang.srt.utils.weight_checker.WeightChecker.handle", weights_told, "AROUND")  # 0.5.23
    if handover.is_set(handover.FORKS):
        _register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, "AFTER")


def _register(target: str, hook: Callable, kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    HookRegistry.register(target, hook, getattr(HookType, kind))


def _fork(result: object, arguments: object) -> None:
    """Let SGLang fork its processes: each one that it spawns imports SGLang anew, for 7 s of a processor."""
    multiprocessing.set_start_method("fork", force=True)


def weights_told(
    original: Callable[..., Any],
    checker: Any,
    action: str,
    allow_quant_error: bool = False,
    skip_tensor_list: Sequence[str] | None = None,
    *,
    role: str,
) -> Any:
    """Answer our two actions of the weight checker in the form of SGLang's checksum; SGLang answers every other one.

    Args:
        skip_tensor_list: for the action `VALUES`, the names of the weights to return.
    """
    if action not in (handover.DIGESTS, handover.VALUES):
        return original(checker, action, allow_quant_error, skip_tensor_list, role=role)
    _check_cuts()
    held = checker._get_model().state_dict()  # parameters and persistent buffers; rope's tables are neither
    checksums = handover.texts_of(held, action, skip_tensor_list or ())
    parallelism = checker._parallelism_info(role=role).model_dump()
    return {"checksums": checksums, "per_gpu_checksum": "", "parallelism_info": parallelism}


def _check_cuts() -> None:
    """Refuse to tell weights that are cut over fewer ranks or stand in another order than SGLang's answer says."""
    if context := sys.modules.get("sglang.srt.runtime_context"):  # 0.5.23
        for axis in ("attn_cp_size", "moe_dp_size"):
            if (size := getattr(context.get_parallel(), axis)) != 1:
                raise NotSeenError(f"the engine runs with {axis} {size}: served is tensor parallelism alone")
    experts = sys.modules.get("sglang.srt.eplb.expert_location")
    placed = experts and experts.get_global_expert_location_metadata()
    if placed and any(row != [*range(len(row))] for row in placed.physical_to_logical_map.tolist()):
        raise NotSeenError("the engine copies or moves its experts (EPLB): served are experts in the model's order")


def allow() -> None:
    """Let SGLang accept the CPU contract's attention backend, before SGLang resolves its arguments.

    A host that starts the server by itself resolves arguments before it loads plugins (SGLang 0.5.23,
    entrypoints/engine.py:1153), but after SGLang has looked for platforms. Therefore `allow` is an entry
    point of the group `sglang.srt.platforms`, though it names no platform.
    """
    if not handover.asked_for():
        return
    from sglang.srt.arg_groups import choices  # pyright: ignore[reportMissingImports]

    # On invariant kernels torch's SDPA is as deterministic as the backends that SGLang lists, even with a prefix from
    # the cache.
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def _align() -> None:
    """Register the hooks that replace SGLang's kernels and orders by the CPU contract's."""
    from true_on_policy.engines.sglang.settings import TARGET

    _register(TARGET, _taken_up, "AFTER")
    allow()
    contract = handover.stated_contract()
    hooks: dict[str, tuple[Callable, str]] = {ROPE: (_frequencies_on_cpu, "AROUND")}
    if contract.leaves > 1:
        hooks[ROW_PARALLEL] = _row_parallel(contract), "REPLACE"
    if (ordered := handover.ordered_norm()) is not None:
        hooks[NORM] = _norm(ordered), "REPLACE"
    for target, (hook, kind) in hooks.items():
        _register(target, hook, kind)
    # Last, because a pinned engine that lacks one of the others would pass for taken up.
    _register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", partial(_pin, [*hooks]), "REPLACE")


def _taken_up(result: object, runner: object) -> None:
    """End a server that has built its model without the contract that was handed over."""
    from true_on_policy.kernels.pin import active_backend

    if active_backend() is None:
        raise PinError(
            f"{handover.CONTRACT} states a contract that this engine did not take up; start SGLang with "
            "--enable-deterministic-inference (under a host: --sglang-enable-deterministic-inference)"
        )


def _pin(targets: Sequence[str], enable_bmm: bool = True) -> None:
    """Pin the CPU kernels where SGLang would switch on its Triton kernels, which need a GPU.

    Raises:
        PinError: a function of `targets` is not as our hook makes it; SGLang only logs that it could not apply one.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry  # pyright: ignore[reportMissingImports]

    if lacking := sorted({*targets} - HookRegistry._patched):
        raise PinError(
            f"SGLang could not apply our hooks to {', '.join(lacking)}; start a release that has each function"
        )
    handover.pin_as_asked()


def _frequencies_on_cpu(compute, self, base):
    """Keep rope's frequencies on the CPU: with `--rl-on-policy-target` SGLang would move them to a GPU."""
    native, self._force_native = self._force_native, False
    try:
        return compute(self, base)
    finally:
        self._force_native = native


def _norm(ordered: Callable):
    """Build SGLang's RMSNorm in the order of rounding that was handed over."""

    def forward(self, x, residual=None, post_residual_addition=None, quant_linear=None):
        assert post_residual_addition is None and quant_linear is None, "no such path in a dense model"
        return ordered(self, x, residual)

    return forward


def _row_parallel(contract: "Contract"):
    """Build the forward of SGLang's row-parallel layers, which add over K in the contract's tree."""
    import torch

    from true_on_policy.kernels.row_parallel import agreed_tree

    tree = agreed_tree(contract)
    assert tree is not None

    def forward(self, input_, skip_all_reduce=False, forward_batch=None, output_tensor=None):
        assert self.input_is_parallel and self.bias is None and output_tensor is None, "no such path in a dense model"
        total = tree.product(input_, self.weight, self.tp_group and self.tp_group.device_group)
        # Where SGLang adds up over the ranks later, rank 0 gives the sum and the other ranks give zeros.
        alone = self.reduce_results or not self.tp_group or self.tp_group.rank_in_group == 0
        return total if alone else torch.zeros_like(total), None

    return forward
