"""The CPU contract: what trainer and engine must share for their log-probs to agree bit by bit, as data."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any, get_args

import torch

from true_on_policy.contract.specs import DtypeName, Side
from true_on_policy.errors import ContractError

CHOICES: dict[str, tuple[str, ...]] = {"dtype": get_args(DtypeName), "norm_order": get_args(Side)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shapes:
    """The shapes at which a model calls its kernels, and at which the probes try them.

    linear: (in_features, out_features) of each weight, the LM head among them.
    attention: (query heads, key-value heads, head_dim) of each kind of layer.
    hidden: widths that are normalized (hidden size, head_dim).
    activated: widths that go through the activation.
    chosen: (number of experts, experts per token, hidden size) of each kind of layer with experts.
    """

    linear: tuple[tuple[int, int], ...] = ((64, 96), (100, 37))
    attention: tuple[tuple[int, int, int], ...] = ((4, 2, 32),)
    hidden: tuple[int, ...] = (64,)
    activated: tuple[int, ...] = (100,)
    chosen: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, model: Any, ranks: int = 1) -> "Shapes":
        """Return the shapes of one tensor-parallel rank with fused weights: qkv, o, gate and up, down, and LM head.

        In a mixture of experts, gate, up and down belong to one expert. After the LM head follow the router,
        and the shared expert with its gate where a model has one.

        Args:
            model: the sizes of the model under Hugging Face's names: a config of Hugging Face, or a `gpu.Size`.
            ranks: the number of tensor-parallel ranks.
        """
        hidden, width, experts = model.hidden_size, model.head_dim, getattr(model, "num_experts", None)
        heads, groups = model.num_attention_heads // ranks, max(model.num_key_value_heads // ranks, 1)
        shared = (getattr(model, "shared_expert_intermediate_size", None) or 0) // ranks
        inner = (model.moe_intermediate_size if experts else model.intermediate_size) // ranks
        return cls(
            linear=(
                (hidden, (heads + 2 * groups) * width),
                (heads * width, hidden),
                (hidden, 2 * inner),
                (inner, hidden),
                (hidden, ceil(model.vocab_size / ranks)),
                *([(hidden, experts)] if experts else []),
                *([(hidden, 2 * shared), (shared, hidden), (hidden, 1)] if shared else []),
            ),
            attention=((heads, groups, width),),
            hidden=(hidden, width),
            activated=(inner, shared, 1) if shared else (inner,),
            chosen=((experts, model.num_experts_per_tok, hidden),) if experts else (),
        )


@dataclass(frozen=True)
class Contract:
    """The agreement between a rollout engine and a trainer, both on the kernels of `kernels/native.py`.

    dtype: a DtypeName, the dtype of the model's matrix products.
    norm_order: the Side whose order of rounding RMSNorm follows on both sides; it matters in bf16 alone.
    trainer_tensor_parallel: ranks over which the trainer splits a row-parallel weight.
    engine_tensor_parallel: ranks over which the engine splits a row-parallel weight.
    leaves: the number of parts of a row-parallel K, a power of two. Both sides add the parts as one tree.
        With 1 leaf the products are ordinary.
    shapes: the shapes at which the kernels are probed.

    Raises:
        ContractError: a choice does not exist, ranks cannot share the leaves, or tensor parallelism differs at 1 leaf.
    """

    dtype: str = "fp32"
    norm_order: str = "engine"
    trainer_tensor_parallel: int = 1
    engine_tensor_parallel: int = 1
    leaves: int = 1
    shapes: Shapes = field(default_factory=Shapes)

    def __post_init__(self):
        for name, choices in CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise ContractError(f"{{contract.{name}}}: got {given!r}; choose one of {', '.join(choices)}")
        _check_tensor_parallel(self.trainer_tensor_parallel, self.engine_tensor_parallel, self.leaves)


def _check_tensor_parallel(trainer: int, engine: int, leaves: int) -> None:
    if leaves < 1 or leaves & (leaves - 1):
        raise ContractError(f"{{contract.leaves}}: got {leaves}; choose a power of two")
    if leaves == 1 and trainer != engine:
        raise ContractError(
            f"{{contract.trainer_tensor_parallel}}: {trainer} but {{contract.engine_tensor_parallel}}: {engine}. A "
            "row-parallel layer adds one partial sum per rank, so another number of ranks rounds differently; set "
            "both equal, or {contract.leaves} to a power of two that both divide"
        )
    for name, ranks in (("trainer", trainer), ("engine", engine)):
        if ranks < 1 or (leaves > 1 and leaves % ranks):
            raise ContractError(
                f"{{contract.{name}_tensor_parallel}}: {ranks} cannot share out {{contract.leaves}}: {leaves}; "
                "choose ranks that divide the leaves"
            )
