"""M2PO: tokens with the largest log ratios leave the loss, until the second moment of all others is small.

Zheng et al. 2025, "Prosperity before Collapse", arxiv.org/abs/2510.01161.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mis_plugins.correction.token_stage import TokenStage
from mis_plugins.packing.collectives import all_reduce
from mis_plugins.packing.ragged import Ragged


def trimmed(stage: TokenStage, ragged: Ragged, threshold: float) -> TokenStage:
    """The stage without the tokens of the micro-batch whose (log r)^2 is too large for a mean below the threshold.

    One collective over context-parallel ranks: the squares of the whole responses.
    """
    assert stage.keep is not None
    squares = torch.where(stage.usable, stage.log_ratio.square(), torch.inf)
    return replace(stage, keep=stage.keep & (squares < first_dropped(_of_all_ranks(squares, ragged), threshold)))


def first_dropped(squares: Float[Tensor, " R"], threshold: float) -> Float[Tensor, " 1"]:
    """The smallest square that is dropped, with every equal one; infinite where all of the finite ones stay.

    Of ascending numbers the mean of the first n never falls with n, so that a count of small means tells how many stay.
    Squares are added up in whole numbers, of units and of a unit's parts: torch has no deterministic running sum of
    floats on a GPU, and raises where a host asks for one by --deterministic-mode. A square beyond twice the number of
    squares, times the largest power of two within the threshold, counts as that: the mean lies above with either.
    Of a million squares the mean is exact to 2^-42 of the threshold, of fewer to more.
    """
    ordered, size = squares.sort().values, squares.numel()
    # The threshold is 1 to 2 times a power of two. A unit is so small a part of this power that sums fill 64 bits.
    unit = 2 ** (61 - 2 * size.bit_length())
    half, exponent = math.frexp(threshold)
    in_units = (ordered.double() / 2.0 ** (exponent - 1)).clamp(max=2 * size) * unit
    limit = 2 * half * unit
    # How far the first n squares lie beyond n times the threshold: in units, and in parts of a unit.
    over = (in_units.long() - int(limit)).cumsum(0)
    parts = ((in_units.frac() * unit).long() - int(limit % 1 * unit)).cumsum(0)
    stay = (over.double() * unit + parts < 0).sum()
    return F.pad(ordered, (0, 1), value=torch.inf).index_select(0, stay.view(1))


def _of_all_ranks(squares: Float[Tensor, " T"], ragged: Ragged) -> Float[Tensor, " R"]:
    """The squares of all response tokens: each lies on one context-parallel rank, so that a sum joins them."""
    if ragged.ranks.cp is None or ragged.responses is None:
        return squares
    whole = squares.new_zeros(ragged.responses.loss_mask.numel()).index_copy_(0, ragged.responses.index, squares)
    all_reduce(whole, ragged.ranks.cp)
    return whole
