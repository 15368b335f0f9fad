"""Hugging Face's decoders in an agreed order of rounding and adding: the model of the `hf` trainer and `hf` engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from true_on_policy.contract.cpu import DTYPES
from true_on_policy.contract.norm_order import add_residual, rms_norm
from true_on_policy.contract.specs import HUGGING_FACE, NormOrder
from true_on_policy.kernels.row_parallel import Tree
from true_on_policy.models.tiny import family_of, model_class, read_config


def load(checkpoint: Path, dtype: str, order: NormOrder | None = None, tree: Tree | None = None) -> Any:
    """Load the model with torch's SDPA; in another order than Hugging Face's, its norms and layers are ours.

    With a `tree`, the products that tensor parallelism would split along K add up as the tree.
    """
    family, proof = family_of(read_config(checkpoint))
    model = model_class(family).from_pretrained(checkpoint, dtype=DTYPES[dtype], attn_implementation="sdpa")
    if order is not None and (family.experts or order != HUGGING_FACE):
        proof.align(model, order)
    if tree is not None:
        add_as(tree, model)
    return model.eval()


def add_as(tree: Tree, model: torch.nn.Module) -> None:
    """Make the products that tensor parallelism would split along K add up as `tree`; the weights stay."""
    for name, module in model.named_modules():
        if name.endswith(ROW_PARALLEL):
            _put_on(tree, module)


def align(model: Any, order: NormOrder) -> None:
    """Make the norms and layers of a decoder follow `order`, by classes of ours; the weights stay.

    A layer of the decoder must normalize before each of its two branches and add each branch to the stream.
    """
    decoder = model.get_decoder()
    norm, layer = type(decoder.norm), type(decoder.layers[0])
    ordered = {norm: of_both(OrderedNorm, norm), layer: of_both(OrderedLayer, layer)}
    for module in decoder.modules():
        if type(module) in ordered:
            module.__class__ = ordered[type(module)]
            module.order = order


def of_both(ours: type, kind: type) -> type:
    """Return a class of both: Hugging Face's class `kind` with our forward pass."""
    return type(ours.__name__, (ours, kind), {})


class OrderedNorm:
    """The forward pass of a norm that follows an order, for `of_both`."""

    order: NormOrder
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.order)


class OrderedLayer:
    """The forward pass of a layer that follows an order, for `of_both`."""

    order: NormOrder
    input_layernorm: Any
    post_attention_layernorm: Any
    self_attn: Any
    mlp: Any

    def forward(self, hidden_states: Tensor, **attention: Any) -> Tensor:
        branch, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **attention)
        stream = add_residual(branch, hidden_states, self.order)
        return add_residual(self.mlp(self.post_attention_layernorm(stream)), stream, self.order)


class TreeLinear(torch.nn.Linear):
    tree: Tree

    def forward(self, input: Tensor) -> Tensor:
        return self.tree.product(input, self.weight)


def _put_on(tree: Tree, module: Any) -> None:
    assert module.bias is None, "no family has one there"
    module.__class__ = TreeLinear
    module.tree = tree


ROW_PARALLEL = (".o_proj", ".down_proj")
