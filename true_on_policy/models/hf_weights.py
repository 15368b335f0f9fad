"""Load the weights of a checkpoint into a model of Hugging Face that is already running."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from true_on_policy.errors import ModelError
from true_on_policy.models.tiny import read_weights

TIED = {"lm_head.weight"}  # a tied head has no weights of its own


def take(model: Any, checkpoint: Path) -> None:
    """Load all weights of a checkpoint.

    Raises:
        ModelError: a weight of the model is not in the checkpoint, and keeps its previous value.
    """
    weights = stacked(read_weights(checkpoint), getattr(model.config, "num_experts", 0))
    missing = {*model.load_state_dict(weights, strict=False).missing_keys} - TIED
    if missing:
        raise ModelError(f"{checkpoint}: holds no {', '.join(sorted(missing))}")


def stacked(weights: Mapping[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Stack the weights of a checkpoint's single experts as Hugging Face's model holds them."""
    others = {name: weight for name, weight in weights.items() if ".mlp.experts." not in name}
    layers = {name.partition(".mlp.experts.")[0] for name in weights.keys() - others.keys()}
    for layer in layers:
        each = [f"{layer}.mlp.experts.{index}" for index in range(experts)]
        pairs = [torch.cat([weights[f"{one}.{part}_proj.weight"] for part in ("gate", "up")]) for one in each]
        others[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(pairs)
        others[f"{layer}.mlp.experts.down_proj"] = torch.stack(
            [weights[f"{one}.down_proj.weight"] for one in each]
        )
    return others
