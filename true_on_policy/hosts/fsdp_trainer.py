"""What Miles's FSDP trainer computes otherwise than SGLang on a CPU, brought in line before its model is built.

The model is Hugging Face's, with torch's SDPA over packed sequences. Miles's own registry of model patches takes ours.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.norm_order import ORDERS, NormOrder
from true_on_policy.contract.specs import HUGGING_FACE
from true_on_policy.errors import ContractError
from true_on_policy.kernels.row_parallel import Tree, agreed_tree
from true_on_policy.models import hf_decoder

REGISTRY = "miles.backends.fsdp_utils.adaptations.class_patches"  # seen at 31f1ca96


def align(actor: Any, contract: Contract) -> None:
    """Bring an actor that has no model yet in line with the engine: its dtypes now, its model once it is built.

    Raises:
        ContractError: this version of Miles has no registry of model patches.
    """
    actor.precision_policy.param_dtype = contract.torch_dtype
    actor.precision_policy.sync_dtype_resolver = lambda name, stated: contract.torch_dtype
    registry = import_module(REGISTRY)
    if not hasattr(registry, "register_model_instance_patch"):
        raise ContractError(
            f"{REGISTRY} has no register_model_instance_patch: no model would be in the engine's order"
        )
    order = ORDERS["sglang"] if contract.norm_order == "engine" else HUGGING_FACE
    put = partial(put_in_order, order=order, tree=agreed_tree(contract))
    registry.register_model_instance_patch(
        registry.ModelInstancePatchHook("true_on_policy", lambda config, args: True, put)
    )


def put_in_order(model: Any, order: NormOrder, tree: Tree | None) -> None:
    """Have a decoder round and add as agreed, each packed sequence by itself.

    A layer in another order than Hugging Face's hands an unrounded stream on. Such a layer has a class of another name,
    so Miles shards the model as a whole, and FSDP rounds nothing between layers.
    """
    model.config.use_cache = False  # with a cache, transformers masks no packed sequence from another
    if order != HUGGING_FACE:
        hf_decoder.align(model, order)
    if tree is not None:
        hf_decoder.add_as(tree, model)
