"""Cut a Hugging Face checkpoint into the parameters that a tensor-parallel rank of Megatron-core holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A shard is one rank's part of a model.

    rank, ranks: the place of the rank among all ranks, which share out each weight of two dimensions.
    groups: the number of key-value heads in the whole model.
    decoder: the prefix of the decoder's weights in Hugging Face's names.
    """

    rank: int
    ranks: int
    groups: int
    decoder: str = "model"

    def parameter(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Build a parameter, given by Megatron's name, from weights by Hugging Face's names."""
        module, _, kind = name.replace(*SHARED_GATE).rpartition(".")  # weight or bias
        if module in NAMES["ends"]:
            held, source = NAMES["ends"][module]
            return HELD[held]([weights[f"{source.replace('*', self.decoder)}.{kind}"]], self)
        _, _, index, part = module.split(".", 3)
        expert = re.search(r"local_experts\.(\d+)", part)
        part = part if expert is None else part.replace(expert[0], "local_experts.*")
        held, *sources = NAMES["layer"][part]
        number = expert[1] if expert else ""
        named = [f"{self.decoder}.layers.{index}.{source.replace('*', number)}.{kind}" for source in sources]
        return HELD[held]([weights[name] for name in named], self)

    def rows(self, weight: Float[Tensor, "N *K"]) -> Float[Tensor, "_ *K"]:
        """Return this rank's share of a weight or a bias, cut along the first dimension."""
        return weight.chunk(self.ranks)[self.rank]


NAMES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("megatron.yaml").read_text(encoding="utf-8"))
# Megatron's gate of a shared expert is no module, so its parameter is renamed as if it were a module's.
SHARED_GATE = ("shared_experts.gate_weight", "shared_experts.gate.weight")
Held = Callable[[Sequence[Tensor], Shard], Tensor]


def padded_rows(vocabulary: int, ranks: int) -> int:
    """Round the rows of an embedding up to a number that the ranks can share."""
    return -(-vocabulary // ranks) * ranks


def _whole(sources: Sequence[Tensor], shard: Shard) -> Tensor:
    return sources[0]


def _rows_padded(sources: Sequence[Tensor], shard: Shard) -> Tensor:
    """Take a rank's rows of an embedding, padded after the vocabulary; the trainer drops the added logits."""
    [weight] = sources
    missing = padded_rows(len(weight), shard.ranks) - len(weight)
    return shard.rows(torch.nn.functional.pad(weight, (0, 0, 0, missing)))


def _rows_by_group(sources: Sequence[Tensor], shard: Shard) -> Tensor:
    """Take a rank's rows of a fused projection, which holds for each query group the rows of q, of k and of v."""
    groups = [source.unflatten(0, (shard.groups, -1)) for source in sources]
    return shard.rows(torch.cat(groups, 1).flatten(0, 1))


def _rows_of_each(sources: Sequence[Tensor], shard: Shard) -> Tensor:
    """Take a rank's rows of gate, followed by its rows of up."""
    return torch.cat([shard.rows(source) for source in sources])


def _columns(sources: Sequence[Tensor], shard: Shard) -> Tensor:
    return sources[0].chunk(shard.ranks, 1)[shard.rank]


HELD: dict[str, Held] = {
    "whole": _whole,
    "rows padded": _rows_padded,
    "rows by group": _rows_by_group,
    "rows of each": _rows_of_each,
    "columns": _columns,
}
