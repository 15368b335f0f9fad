"""One palette for every picture of the project: each colour has one meaning.

The colours are those of Okabe and Ito, which stay apart for colour-blind readers (jfly.uni-koeln.de/color). A picture
never tells two things apart by colour alone: lines carry their names, and the rollout policy is hollow and dashed.
"""

from __future__ import annotations

from matplotlib.axes import Axes

VERMILLION, BLUE, GREEN, PURPLE, AMBER, SKY, BLACK = (
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
FRAME, GRID, TEXT = "#9AA0A6", "#E8EAED", "#202124"

OTHERS = (SKY, BLACK, PURPLE, AMBER, GREEN, BLUE, VERMILLION)
"""Colours of curves without a meaning, in the order in which a picture draws them."""

MEANING = {
    "uncorrected": VERMILLION,
    "no weights": VERMILLION,
    "stock": VERMILLION,
    "int3, uncorrected": VERMILLION,
    "corrected": BLUE,
    "TIS + geometric + BN": BLUE,
    "segment-wise": BLUE,
    "truly on policy": GREEN,
    "matched": GREEN,
    "matched precision": GREEN,
    "synchronous": GREEN,
    "on-policy": GREEN,
    "sequence": PURPLE,
    "clip against next": PURPLE,
    "token TIS": AMBER,
    "standard": AMBER,
}
"""Vermillion is uncorrected, blue our correction, green no mismatch, amber token weights, purple products."""


def color(name: str, index: int = 0) -> str:
    """The colour of a curve by the meaning of its name; without a meaning, the one at `index` of `OTHERS`."""
    known = MEANING.get(name) or MEANING.get(name.partition(" (")[0])
    return known or OTHERS[index % len(OTHERS)]


def dress(axis: Axes, title: str, size: int = 11, labels: int = 9, grid: bool = True) -> None:
    """Give an axis the look of all pictures: a title on the left, a faint grid behind, no frame above and right."""
    axis.set_title(title, loc="left", fontsize=size, color=TEXT, fontweight="bold")
    axis.tick_params(colors=TEXT, labelsize=labels)
    if grid:
        axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FRAME)
