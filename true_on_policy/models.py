"""Tiny Qwen3 checkpoints of random weights, for proofs that must run on any machine in seconds.

The weights of the norms are random too: all ones hide the order in which RMSNorm casts and multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from true_on_policy.errors import TrueOnPolicyError

MAX_POSITIONS = 2048


class ModelError(TrueOnPolicyError):
    """A model that is neither one of the tiny ones nor a checkpoint on disk."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def config(self, dtype: torch.dtype) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            architectures=["Qwen3ForCausalLM"],
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
            dtype=dtype,
        )


# Powers of two in one, widths that no vector divides and a tied head in the other.
TINY = {
    "tiny-qwen3": Shape(128, 256, 3, 4, 2, 32, 320, tied=False),
    "tiny-qwen3-tied": Shape(320, 712, 5, 6, 2, 64, 333, tied=True),
}


def checkpoint(name: str, folder: Path, dtype: torch.dtype, seed: int) -> Path:
    """A tiny model written to `folder` in the format of Hugging Face; the same name, dtype and seed give the same bytes.

    Raises:
        ModelError: no tiny model of this name.
    """
    if name not in TINY:
        raise ModelError(
            f"--model: got {name!r}; choose one of {', '.join(TINY)}, or a folder of a checkpoint"
        )
    model = Qwen3ForCausalLM(TINY[name].config(dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_draw(parameter, generator))
    model.to(dtype).save_pretrained(folder)
    return folder


def _draw(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Norms in [0.5, 1.5); weights so wide that activations neither vanish nor grow."""
    if parameter.dim() == 1:
        return torch.rand(parameter.shape, generator=generator) + 0.5
    return torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5


def ragged_prompts(vocab: int, seed: int, longest: int) -> Iterator[list[int]]:
    """Prompts without end, of lengths 1 to `longest`, short ones more often; the ids 0 and 1 never occur."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        share = torch.rand((), generator=generator).item() ** 3
        length = 1 + round(share * (longest - 1))
        yield torch.randint(2, vocab, (length,), generator=generator).tolist()
