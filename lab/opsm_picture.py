"""The picture of docs/opsm.md: which responses OPSM keeps, in the plane of mismatch and staleness.

    python -m lab.opsm_picture docs/opsm.png

Nothing is measured: the points are a grid, and the code of the training path decides which of them are dropped.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.opsm_picture:main", extra="verify")

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.palette import BLUE, FRAME, TEXT, VERMILLION, dress
from lab.provenance import parser_of
from mis_plugins.config.model import OpsmConfig
from mis_plugins.correction.opsm import on_policy
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks

DELTA, REACH, SIDE = 0.02, 0.05, 21


def grid() -> tuple[torch.Tensor, torch.Tensor]:
    """The mean log ratios of a grid of responses: mismatch pi_old / mu, and staleness pi_theta / pi_old."""
    line = torch.linspace(-REACH, REACH, SIDE)
    mismatch, staleness = torch.meshgrid(line, line, indexing="ij")
    return mismatch.flatten(), staleness.flatten()


def kept(mismatch: torch.Tensor, staleness: torch.Tensor, advantage: float) -> torch.Tensor:
    """Whether OPSM keeps responses of one token each, by the function that the loss hook calls."""
    count = len(mismatch)
    ragged = whole([1] * count).place(torch.ones(count, dtype=torch.bool), Ranks())
    behavior = torch.full((count,), -1.0)
    advantages = torch.full((count,), advantage)
    return on_policy(behavior + mismatch + staleness, behavior, advantages, ragged, OpsmConfig(DELTA))


def draw(path: Path) -> None:
    """Draw two panels, A < 0 and A > 0; the first has the lines of both references and a geometric window."""
    figure = Figure(figsize=(10, 5), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, sharey=True)
    mismatch, staleness = grid()
    for axis, advantage, title in zip(axes, (-1.0, 1.0), ("A < 0", "A > 0: all are kept"), strict=True):
        stays = kept(mismatch, staleness, advantage)
        axis.plot(mismatch[stays], staleness[stays], "o", color=BLUE, ms=4)
        axis.plot(mismatch[~stays], staleness[~stays], "x", color=VERMILLION, ms=5)
        dress(axis, title, grid=False)
        axis.set(xlim=(-1.15 * REACH, 1.15 * REACH), ylim=(-1.15 * REACH, 1.15 * REACH))
        axis.set_xlabel("mean log pi_old / mu: the engines", color=TEXT)
    _lines(axes[0])
    axes[0].set_ylabel("mean log pi_theta / pi_old: the update", color=TEXT)
    figure.savefig(path, dpi=150, format="png")


def _lines(axis: Axes) -> None:
    axis.plot([-REACH, REACH], [REACH - DELTA, -REACH - DELTA], color=VERMILLION, lw=1.5)
    axis.axhline(-DELTA, color=FRAME, lw=1.2, ls="--")
    axis.axvline(-0.01, color=FRAME, lw=1.2, ls=":")
    axis.axvline(0.01, color=FRAME, lw=1.2, ls=":")
    said = (
        (-0.048, -0.046, "dropped", VERMILLION, "left"),
        (0.048, 0.046, "kept", BLUE, "right"),
        (-0.047, 0.0335, "rho_geo = e^-delta", VERMILLION, "left"),
        (0.051, -DELTA + 0.001, "reference: proximal", TEXT, "right"),
        (0.0115, 0.0515, "geometric window", TEXT, "left"),
    )
    for x, y, words, shade, side in said:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}
        axis.text(x, y, words, color=shade, ha=side, fontsize=9, bbox=box)


def main() -> int:
    """Draw the picture."""
    parser = parser_of(__doc__)
    parser.add_argument("picture", type=Path, metavar="FILE.png")
    draw(parser.parse_args().picture)
    return 0
