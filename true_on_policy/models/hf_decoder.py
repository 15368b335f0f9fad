"""Hugging Face's decoders in an agreed order of rounding and adding: the model of the `hf` trainer and `hf` engine."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract.cpu import DTYPES
from true_on_policy.contract.rounding import add_residual, chosen, combined, rms_norm
from true_on_policy.contract.specs import HUGGING_FACE, NormOrder
from true_on_policy.errors import ModelError
from true_on_policy.kernels.row_parallel import Tree
from true_on_policy.models.tiny import family_of, model_class, read_config, read_weights

HEAD = "lm_head.weight"
Tokens = Int64[Tensor, "B T"]


def load(checkpoint: Path, dtype: str, order: NormOrder | None = None, tree: Tree | None = None) -> Any:
    """Load the model with torch's SDPA; in another order than Hugging Face's, its norms and layers are ours.

    With a `tree`, the products that tensor parallelism would split along K add up as the tree.
    """
    family = family_of(read_config(checkpoint))
    model = model_class(family).from_pretrained(checkpoint, dtype=DTYPES[dtype], attn_implementation="sdpa")
    take(model, checkpoint)  # transformers itself makes a weight up that the checkpoint lacks
    if order is not None and (family.experts or order != HUGGING_FACE):
        family.align(model, order)
    if tree is not None:
        add_as(tree, model)
    return model.eval()


def add_as(tree: Tree, model: torch.nn.Module) -> None:
    """Make the products that tensor parallelism would split along K add up as `tree`; the weights stay."""
    for name, module in model.named_modules():
        if name.endswith((".o_proj", ".down_proj")):
            assert module.bias is None, "no family has one there"
            module.__class__ = TreeLinear
            module.tree = tree  # pyright: ignore[reportArgumentType]


def padded(sequences: Sequence[Sequence[int]], side: Literal["left", "right"]) -> tuple[Tokens, Tokens]:
    """Pad sequences on one side; return their tokens, and a mask that is 1 where a slot holds a token."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    tokens, present = (
        pad_sequence(each, batch_first=True, padding_side=side) for each in (rows, [*map(torch.ones_like, rows)])
    )
    return tokens, present


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

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.order)


class OrderedLayer:
    """The forward pass of a layer that follows an order, for `of_both`."""

    def forward(self: Any, hidden_states: Tensor, **attention: Any) -> Tensor:
        branch, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **attention)
        stream = add_residual(branch, hidden_states, self.order)
        return add_residual(self.mlp(self.post_attention_layernorm(stream)), stream, self.order)


class TreeLinear(torch.nn.Linear):
    tree: Tree

    def forward(self, input: Tensor) -> Tensor:
        return self.tree.product(input, self.weight)


def check_weights(checkpoint: Path) -> None:
    """Check that a checkpoint holds the weights of the model that its config.json states; raises ModelError if not."""
    kind = model_class(family_of(read_config(checkpoint)))
    with torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(checkpoint))
    fitting(model, checkpoint)


def take(model: Any, checkpoint: Path) -> None:
    """Load all weights of a checkpoint, which `fitting` checks."""
    model.load_state_dict(fitting(model, checkpoint), strict=False)


def fitting(model: Any, checkpoint: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint as Hugging Face's model holds them, without a tied head.

    Raises:
        ModelError: the model has other weights by name and shape, or its tied head is not the embedding.
    """
    try:
        weights, held = stacked(read_weights(checkpoint)), model.state_dict()
    except KeyError as lacking:
        raise ModelError(f"{checkpoint}: holds no {lacking.args[0]}") from None
    except RuntimeError as error:
        raise ModelError(f"{checkpoint}: experts of other shapes: {error}") from None
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        del held[HEAD]
        embedding = weights.get(next(name for name in held if name.endswith("embed_tokens.weight")))
        if embedding is not None and not equal_bits(weights.pop(HEAD, embedding), embedding):
            raise ModelError(f"{checkpoint}: holds a {HEAD} other than the embedding, to which its config.json ties it")
    theirs, ours = ({f"{name} {list(x.shape)}" for name, x in of.items()} for of in (weights, held))
    if faults := [f"no {name}" for name in sorted(ours - theirs)] or sorted(theirs - ours):
        raise ModelError(f"{checkpoint}: holds {', '.join(faults)}, other than its config.json says")
    return weights


def stacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the weights of single experts as Hugging Face's model holds them, and leave rope's frequencies out."""
    of_expert = re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$|\.inv_freq$")
    others = {name: weight for name, weight in weights.items() if not of_expert.search(name)}
    downs = (name for name in weights if re.search(r"\.mlp\.experts\.\d+\.down_proj\.weight$", name))
    counts = Counter(name.partition(".mlp.experts.")[0] for name in downs)
    for layer, experts in counts.items():
        each = [f"{layer}.mlp.experts.{index}" for index in range(experts)]
        pairs = [torch.cat([weights[f"{expert}.{part}_proj.weight"] for part in ("gate", "up")]) for expert in each]
        others[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(pairs)
        others[f"{layer}.mlp.experts.down_proj"] = torch.stack(
            [weights[f"{expert}.down_proj.weight"] for expert in each]
        )
    return others


def align_experts(model: Any, order: NormOrder) -> None:
    """Make routers and experts follow the order of experts, and norms and layers follow `order`."""
    if order != HUGGING_FACE:
        align(model, order)
    for layer in model.model.layers:
        for module, ours in ((layer.mlp.gate, OrderedRouter), (layer.mlp.experts, OrderedExperts)):
            module.__class__ = of_both(ours, type(module))


class OrderedRouter:
    """The forward pass of a router in the order of experts, for `of_both`."""

    def forward(self: Any, hidden_states: Float[Tensor, "T H"]) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states, self.weight)
        return logits, *chosen(logits, self.top_k, self.norm_topk_prob)


class OrderedExperts:
    """The forward pass of the experts in the order of experts, for `of_both`."""

    def forward(
        self: Any,
        hidden_states: Float[Tensor, "T H"],
        top_k_index: Int64[Tensor, "T K"],
        top_k_weights: Float32[Tensor, "T K"],
    ) -> Float[Tensor, "T H"]:
        by_expert = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=self.num_experts).tolist()
        received = hidden_states[by_expert // top_k_index.shape[1]].split(counts)
        outputs = torch.cat([self._expert(index, rows) for index, rows in enumerate(received) if len(rows)])
        return combined(outputs, by_expert.argsort().view_as(top_k_index), top_k_weights)

    def _expert(self: Any, index: int, rows: Float[Tensor, "N H"]) -> Float[Tensor, "N H"]:
        gate, up = F.linear(rows, self.gate_up_proj[index]).chunk(2, -1)
        return F.linear(self.act_fn(gate) * up, self.down_proj[index])
