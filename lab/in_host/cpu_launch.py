"""A launch of Miles or slime on a CPU under the CPU contract: its flags, its environment, and the check of both.

The environment states the contract, and Ray hands the environment to the trainers and to the engines alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from true_on_policy.contract.gpu import REASONS
from true_on_policy.contract.sides import TRAINERS
from true_on_policy.contract.specs import NormOrder
from true_on_policy.engines.handover import CONTRACT, ORDER, handed_over, stated_contract
from true_on_policy.errors import ContractError
from true_on_policy.flags.rules import PREFIX, UNFUSED, Flag, Refusal, faults, refuse

if TYPE_CHECKING:
    from true_on_policy.contract.cpu import Contract

LAYERS = ("lab.in_host.layers", "layers")
HOOK = "lab.in_host.fsdp_trainer.watch"  # Ray's worker_process_setup_hook, for Miles's FSDP trainer
PLUGINS = ("sglang.srt.plugins", "sglang.srt.platforms")
EAGER = {"TORCH_COMPILE_DISABLE": "1"}  # compiled on neither side
FSDP, MEGATRON = "fsdp", "megatron"  # Miles's --train-backend

_WHOLE = "log-probs are those of the whole vocabulary"
_PLAIN = "the CPU contract has no such model"
REFUSALS = (
    Refusal("rollout_top_p", (1,), f"{_WHOLE}; leave --rollout-top-p at 1"),
    Refusal("rollout_top_k", (-1,), f"{_WHOLE}; leave --rollout-top-k at -1"),
    Refusal("pipeline_model_parallel_size", (1,), "our layers are those of one stage"),
    Refusal("sequence_parallel", (False,), "row-parallel layers add up whole rows; drop --sequence-parallel"),
    Refusal("num_experts", (None, 0), _PLAIN),
    Refusal("add_qkv_bias", (False,), _PLAIN),
    Refusal("multimodal_keys", (None,), f"images are not certified: {REASONS['images']}"),
    Refusal("lora_rank", (None, 0), _PLAIN),
    Refusal("fp16", (False,), "the CPU contract has fp32 and bf16; launch without --fp16"),
    Refusal("sglang_quantization", (None,), f"{_PLAIN}; drop --sglang-quantization"),
    Refusal("sglang_kv_cache_dtype", ("auto",), "a cache in another dtype; drop --sglang-kv-cache-dtype"),
    Refusal("sglang_speculative_algorithm", (None,), "no drafts; drop --sglang-speculative-algorithm"),
    Refusal(
        "true_on_policy_mode",
        (False,),
        "Miles then rounds log-probs to bf16, which hides differences; launch without --true-on-policy-mode",
    ),
)
_ENGINE_DTYPES = {"fp32": ("float32",), "bf16": ("auto", "bfloat16")}


def environment_of(contract: Contract, backend: str = MEGATRON) -> dict[str, str]:
    """Return the variables that all processes of a launch must have."""
    order = trainer_order(backend) if contract.norm_order == "trainer" else None
    return handed_over(contract, order) | EAGER


def trainer_order(backend: str) -> NormOrder:
    """Return the order in which a trainer rounds by itself; an FSDP trainer runs Hugging Face's model."""
    return TRAINERS["hf" if backend == FSDP else "megatron"].order


def launch_flags(contract: Contract, backend: str = MEGATRON) -> tuple[Flag, ...]:
    """List the arguments of a launch under the CPU contract.

    Raises:
        ContractError: the backend has no tensor parallelism, which the contract asks for.
    """
    return (*_engine_flags(contract), *(_fsdp if backend == FSDP else _megatron)(contract))


def _engine_flags(contract: Contract) -> tuple[Flag, ...]:
    return (
        Flag.of("sglang", f"{PREFIX}enable-deterministic-inference"),
        Flag.of("sglang", f"{PREFIX}device", "cpu"),
        Flag.of("sglang", f"{PREFIX}attention-backend", "torch_native"),
        Flag.of("sglang", f"{PREFIX}sampling-backend", "pytorch"),
        Flag.of("sglang", f"{PREFIX}dtype", _ENGINE_DTYPES[contract.dtype][-1]),
        Flag.of("miles", "--rollout-num-gpus-per-engine", contract.engine_tensor_parallel),
    )


def _megatron(contract: Contract) -> tuple[Flag, ...]:
    return (
        Flag(("--spec", *LAYERS), "megatron", "spec", list(LAYERS)),
        Flag.of("megatron", "--transformer-impl", "local"),
        *UNFUSED,
        Flag.of("megatron", "--tensor-model-parallel-size", contract.trainer_tensor_parallel),
    )


def _fsdp(contract: Contract) -> tuple[Flag, ...]:
    if contract.trainer_tensor_parallel > 1:
        raise ContractError(
            f"contract.trainer_tensor_parallel: {contract.trainer_tensor_parallel} on FSDP, which splits no product; "
            "choose 1"
        )
    return (Flag.of("miles", "--train-backend", FSDP), Flag.of("fsdp", "--attn-implementation", "sdpa"))


def check(args: Any, environment: Mapping[str, str]) -> Contract:
    """Return the contract that the environment states, after checking that every argument keeps it.

    Raises:
        ContractError: no contract is stated, an engine would not take it up, or a setting breaks the
            contract.
    """
    if CONTRACT not in environment:
        raise ContractError(
            f"a launch on a CPU takes its contract from the environment of Ray's job, where {CONTRACT} is unset"
        )
    contract, backend = stated_contract(environment), getattr(args, "train_backend", MEGATRON)
    wanted = environment_of(contract, backend)
    found = [_variable(name, wanted.get(name), environment.get(name)) for name in (ORDER, *EAGER)]
    found += [_plugin(group) for group in PLUGINS if not _installed(group)]
    refuse([*filter(None, found), *faults(args, REFUSALS, launch_flags(contract, backend))])
    return contract


def _variable(name: str, wanted: str | None, found: str | None) -> str:
    if found == wanted:
        return ""
    how = "without it" if wanted is None else f"with {name}={wanted}"
    return f"{name} is {found!r} in the environment; start Ray's job {how}"


def _installed(group: str) -> bool:
    return any(point.name == "true_on_policy" for point in entry_points(group=group))


def _plugin(group: str) -> str:
    return f"no entry point true_on_policy in the group {group}, so no engine is pinned; install mis-plugins again"
