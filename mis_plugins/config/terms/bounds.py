"""Bounds of an importance weight: what becomes of a ratio within its limits and beyond. A new one is a row of `BOUNDS`.

TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". MIS and geometric
masking: Liu, Li et al. 2025, "When Speed Kills Stability". IcePop: Ling Team 2025, "Every Step Evolves".
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mis_plugins.config.terms.divergence import Tensor

Outside = Literal["weighed", "zeroed", "dropped"]


@dataclass(frozen=True)
class Bound:
    """One bound of a weight, with everything that the pack knows of it.

    apply: called with ratio, floor and ceiling: the weight within the limits and, where `outside` is `weighed`, beyond.
    outside: what becomes of a ratio beyond the limits: `weighed` by `apply`; `zeroed`, its token weighs 0 and stays in
        the loss mask; `dropped`, its token leaves the loss mask.
    formula: with `{ratio}`, `{lower}`, `{upper}` and `{within}`, which says that the ratio lies within its limits.
    words: with `{upper}`, `{range}` and `{where}`.
    has_floor, has_ceiling: whether `lower` and `upper` limit it.
    keeps_zero: whether a ratio of 0 gets the weight 0; the ratio of an unusable token reads 0.
    monotone: whether, among tokens that stay in the loss mask, a larger ratio never has a smaller weight.
    """

    apply: Callable[[Tensor, float, float], Tensor]
    outside: Outside
    formula: str
    words: str
    has_floor: bool = True
    has_ceiling: bool = True
    keeps_zero: bool = True
    monotone: bool = True

    @cached_property
    def drops_token(self) -> bool:
        """Whether a token beyond the limits leaves the loss mask, and every mean."""
        return self.outside == "dropped"

    @cached_property
    def zeroes(self) -> bool:
        """Whether a token beyond the limits weighs 0 and counts in every mean."""
        return self.outside == "zeroed"

    @cached_property
    def weighs_outside(self) -> bool:
        """Whether a token beyond the limits has a weight."""
        return self.outside == "weighed"


def unbounded(ratio: Tensor, floor: float, ceiling: float) -> Tensor:
    """r itself; the caller drops or zeroes tokens outside a mask or zero bound."""
    return ratio


def truncate(ratio: Tensor, floor: float, ceiling: float) -> Tensor:
    """min(r, upper)."""
    return ratio.clamp(max=ceiling)


def clip(ratio: Tensor, floor: float, ceiling: float) -> Tensor:
    """min(max(r, lower), upper)."""
    return ratio.clamp(floor, ceiling)


BOUNDS: dict[str, Bound] = {
    "none": Bound(unbounded, "weighed", "{ratio}", "as it is", has_floor=False, has_ceiling=False),
    # TIS
    "truncate": Bound(truncate, "weighed", "min({ratio}, {upper})", "capped at {upper}", has_floor=False),
    # CIS
    "clip": Bound(clip, "weighed", "min(max({ratio}, {lower}), {upper})", "clipped to {range}", keeps_zero=False),
    # MIS, IcePop
    "mask": Bound(
        apply=unbounded,
        outside="dropped",
        formula="{ratio} where {within}, else the token is dropped",
        words="used as it is {where}, dropped from the loss elsewhere",
    ),
    "zero": Bound(
        unbounded, "zeroed", "{ratio} where {within}, else 0", "used as it is {where}, 0 elsewhere", monotone=False
    ),
}
"""By the name that a config gives in `bound`."""
