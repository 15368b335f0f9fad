"""Query and key as SGLang's own M-RoPE rotates them on CPU, by SGLang's python, for heads and positions in a file.

    python sglang_mrope.py CASE OUTPUTS      files of safetensors

Each section is rotated with a token's time, height and width alike, and with a height and a width of their own.
"""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding  # pyright: ignore[reportMissingImports]


def main(case: str, made: str) -> None:
    with safe_open(case, "pt") as file:
        heads, positions = file.get_tensor("heads"), file.get_tensor("positions")
        asked = json.loads(file.metadata()["asked"])
    moved = torch.stack([positions, positions + 1, positions + 2])
    width, found = heads.shape[-1], {}
    for interleaved in (False, True):
        for section in asked["sections"]:
            rope = MRotaryEmbedding(width, width, 4096, asked["base"], True, heads.dtype, section, interleaved)
            for name, three in (("alike", positions.expand(3, -1)), ("moved", moved)):
                query, key = rope.forward_native(three, heads.flatten(1), heads[:, :1].flatten(1))
                found[f"{name} {section} {interleaved}"] = torch.cat((query, key), -1)
    save_file(found, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
