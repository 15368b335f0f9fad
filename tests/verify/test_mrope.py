"""On text alone M-RoPE is plain rope: a token's time, height and width are equal, whichever a column follows."""

from itertools import product

import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding, apply_rotary_pos_emb

from true_on_policy.bitwise import equal_bits
from true_on_policy.contract import rounding as rope

WIDTH = 16  # of a head
SECTIONS = [(time, height, 8 - time - height) for time, height in product(range(9), repeat=2) if time + height <= 8]
POSITIONS = torch.tensor([0, 1, 2, 3, 7, 100, 511, 512, 2047])


def rotation(section: tuple[int, int, int], positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cos and sin of Hugging Face's interleaved M-RoPE for positions `[3, T]`."""
    parameters = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [*section], "mrope_interleaved": True}
    config = Qwen3VLTextConfig(head_dim=WIDTH, rope_parameters=parameters)
    x = torch.zeros(1, dtype=dtype)
    return torch.stack(Qwen3VLTextRotaryEmbedding(config)(x, positions[:, None].clone()))[:, 0]


def plain(positions: torch.Tensor) -> torch.Tensor:
    """The angles of plain rope, by its formula."""
    columns = torch.arange(0, WIDTH, 2, dtype=torch.float) / WIDTH
    angles = positions[:, None].float() * (1.0 / 5e6**columns)
    return torch.cat((angles, angles), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("section", SECTIONS)
def test_with_equal_positions_every_section_is_plain_rope(section: tuple[int, int, int], dtype: torch.dtype):
    cos, sin = rotation(section, POSITIONS.expand(3, -1), dtype)
    angles = plain(POSITIONS)
    assert equal_bits(cos, angles.cos().to(dtype)) and equal_bits(sin, angles.sin().to(dtype))
    heads = torch.randn(1, 2, len(POSITIONS), WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    turned, _ = apply_rotary_pos_emb(heads, heads, cos[None], sin[None])
    assert equal_bits(turned, rope.rotated(heads, angles))


def test_with_other_heights_it_is_not_and_the_section_tells_which_columns():
    """The identity above would be empty if no column followed height or width."""
    moved = torch.stack([POSITIONS, POSITIONS + 1, POSITIONS + 2])
    apart = {section: rotation(section, moved, torch.float32) for section in SECTIONS if 8 not in section}
    still = plain(POSITIONS)
    assert all(not equal_bits(sin, still.sin()) for _, sin in apart.values())
    assert not equal_bits(apart[6, 1, 1], apart[4, 2, 2])
