"""Align Miles's FSDP trainer with SGLang on a CPU, before the trainer builds its model.

    ray job submit --runtime-env-json '{"worker_process_setup_hook": "lab.in_host.fsdp_trainer.watch", ...}' ...

The model is Hugging Face's, with torch's SDPA over packed sequences. Our patch goes into Miles's own registry
of model patches.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from true_on_policy.contract.cpu import DTYPES, Contract
from true_on_policy.contract.rounding import ORDERS, NormOrder
from true_on_policy.contract.specs import HUGGING_FACE
from true_on_policy.errors import ContractError
from true_on_policy.fsdp_worker import follow_step
from true_on_policy.kernels.row_parallel import Tree, agreed_tree
from true_on_policy.models import hf_decoder

REGISTRY = "miles.backends.fsdp_utils.adaptations.class_patches"  # seen at 31f1ca96


def watch() -> None:
    """Pin and align in this process once it imports Miles's FSDP trainer; Ray calls it in each worker."""
    follow_step(_start)


def _start(actor: Any, args: Any) -> None:
    from lab.in_host import cpu_trainer  # imports the kernels, in the trainer alone

    align(actor, cpu_trainer.start(args))


def align(actor: Any, contract: Contract) -> None:
    """Align an actor that has no model yet: set its dtypes now, and register a patch for its model.

    Raises:
        ContractError: this version of Miles has no registry of model patches.
    """
    actor.precision_policy.param_dtype = DTYPES[contract.dtype]
    actor.precision_policy.sync_dtype_resolver = lambda name, stated: DTYPES[contract.dtype]
    registry = import_module(REGISTRY)
    if not hasattr(registry, "register_model_instance_patch"):
        raise ContractError(f"{REGISTRY} has no register_model_instance_patch: no model would be in the engine's order")
    order = ORDERS["sglang"] if contract.norm_order == "engine" else HUGGING_FACE
    put = partial(put_in_order, order=order, tree=agreed_tree(contract))
    registry.register_model_instance_patch(
        registry.ModelInstancePatchHook("true_on_policy", lambda config, args: True, put)
    )


def put_in_order(model: Any, order: NormOrder, tree: Tree | None) -> None:
    """Make a decoder round and add in the agreed order, with each packed sequence masked from the others.

    In another order than Hugging Face's, a layer hands on an unrounded stream. The layer's class has another
    name, so Miles shards the model as a whole, and FSDP rounds nothing between layers.
    """
    model.config.use_cache = False  # with a cache, transformers masks no packed sequence from another
    if order != HUGGING_FACE:
        hf_decoder.align(model, order)
    if tree is not None:
        hf_decoder.add_as(tree, model)
