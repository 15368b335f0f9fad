"""Pin a trainer of Miles or slime on a CPU and align it with SGLang, before the trainer builds its model.

    --custom-megatron-init-path lab.in_host.cpu_trainer.miles_init  --spec lab.in_host.layers layers

The contract is the one that TRUE_ON_POLICY_CONTRACT states in the environment of Ray's job. Our layers align norms,
residuals and row sums. No flag aligns the rest: the formula of log-probs, the dtype of rope, and float32 parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from lab.in_host import cpu_launch
from mis_plugins.config.view import view
from mis_plugins.hosts import megatron
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.needs import Need
from mis_plugins.hosts.ownership import Hook
from mis_plugins.hosts.registry import current, every_host
from true_on_policy.contract import rounding
from true_on_policy.contract.cpu import Contract
from true_on_policy.errors import ContractError
from true_on_policy.hosts.start import check_configs
from true_on_policy.kernels.pin import pin


@Hook
def miles_init(args: Any) -> None:
    """Pin and align the trainer in the init hook of Miles or slime on Megatron, or keep the trainer from starting."""
    start(args)


def start(args: Any) -> Contract:
    """Check the settings, pin the kernels and align the trainer; return the contract that holds from now on."""
    args = view(args)
    contract = cpu_launch.check(args, os.environ)
    check_configs(args)
    pin(contract)
    align(contract, args)
    return contract


def align(contract: Contract, args: Any) -> None:
    """Replace what this trainer's host computes otherwise than the engine; the kernels are pinned already.

    Raises:
        ContractError: no formula of ours fits the host's log-probs, the host lacks a function that is
            replaced, or Megatron's `vocab_size` is missing.
    """
    host = current(args)
    if (scored := _formula(host)) is None:
        raise ContractError(
            f"log-probs of {host.name} have no agreed formula on a CPU; launch with {' or '.join(aligned())}"
        )
    vocabulary = _vocabulary(args) if host.megatron else None  # on FSDP no column pads the vocabulary
    beside_entropy = "with_entropy" in scored.parameters
    _replace_in(
        *scored.owner(),
        lambda own: log_probs_and_entropy_of(own, vocabulary) if beside_entropy else log_probs_of(vocabulary),
    )
    if host.megatron:
        _align_megatron(contract)


def aligned() -> list[str]:
    """Names of the hosts whose trainers can be aligned."""
    return [host.name for host in every_host().values() if _formula(host)]


def _formula(host: Host) -> Need | None:
    return getattr(host.needs, "log_probs", None)


def _vocabulary(args: Any) -> int:
    if not args.vocab_size:
        raise ContractError(
            f"vocab_size is {args.vocab_size!r}: log-probs are those of the whole vocabulary, without the columns that "
            "pad it; launch with --vocab-size and the vocab_size of the checkpoint's config.json"
        )
    return args.vocab_size


def _align_megatron(contract: Contract) -> None:
    _replace(rounding.ROPE_MODULE, rounding.ROPE_NAME, lambda own: rounding.rotated)
    if contract.dtype == "fp32":  # both hosts choose bf16 wherever fp16 is not asked for
        build_in_float32()


def build_in_float32() -> None:
    """Have Megatron build parameters in float32: it reads its own arguments, which a host sets before its init hook.

    Raises:
        ContractError: Megatron has no arguments yet.
    """
    own = megatron.arguments()
    if own is None:
        raise ContractError(
            "megatron.training.global_vars holds no arguments, so that an fp32 contract cannot set its parameters' "
            "dtype: the host must call set_args before the function of --custom-megatron-init-path"
        )
    own.bf16, own.params_dtype = False, torch.float32


def _replace(module: str, name: str, made: Callable[[Any], Any]) -> None:
    """Replace a module's function by what `made` returns for it."""
    owner = import_module(module)
    if not hasattr(owner, name):
        raise ContractError(
            f"{module} has no {name}: in this version the host computes elsewhere what a formula of ours replaces"
        )
    _replace_in(owner, name, made)


def _replace_in(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    setattr(owner, name, made(getattr(owner, name)))


def log_probs_of(vocabulary: int | None) -> Any:
    """Build a function for the log-probs of given tokens, which agrees with SGLang's bit by bit.

    The formula takes log_softmax over the whole vocabulary in float32, without the columns that pad it.
    """

    def log_probs(
        logits: Float[Tensor, "T V"], tokens: Int64[Tensor, "T"], group: Any, **unused: Any
    ) -> Float32[Tensor, "T"]:
        whole = _gathered(logits, group)[:, :vocabulary].float()
        return torch.log_softmax(whole, -1).gather(1, tokens[:, None])[:, 0]

    return log_probs


def log_probs_and_entropy_of(own: Any, vocabulary: int | None) -> Any:
    """Build a function for the log-probs of `log_probs_of` as a column, and the host's own entropy."""
    log_probs = log_probs_of(vocabulary)

    def both(
        logits: Float[Tensor, "T V"],
        tokens: Int64[Tensor, "T"],
        group: Any,
        *,
        with_entropy: bool,
        log_prob_keep_mask: None,
        **options: Any,
    ) -> tuple[Float32[Tensor, "T 1"], Tensor | None]:
        kept = {"log_prob_keep_mask": log_prob_keep_mask, **options}
        entropy = own(logits, tokens, group, with_entropy=True, **kept)[1] if with_entropy else None
        return log_probs(logits, tokens, group)[:, None], entropy

    return both


def _gathered(logits: Float[Tensor, "T V"], group: Any) -> Float[Tensor, "T W"]:
    """Gather the vocabulary of all tensor-parallel ranks; a rank's gradient is that of its own columns."""
    if group is None or group.size() == 1:
        return logits
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits, group)
