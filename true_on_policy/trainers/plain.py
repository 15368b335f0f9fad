"""The config that all decoders of Megatron-core on a CPU share, in a proof and in the embedded host."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

DECODER: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "cuda_graph_scope": [],  # Megatron's default would only print a warning on a CPU
}
"""Arguments of a TransformerConfig."""
