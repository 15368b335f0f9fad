"""The picture of a verification: engine minus trainer for each token, with stock and with pinned kernels."""

from __future__ import annotations

from pathlib import Path

import torch

from mis_plugins.shared.opened import optional
from mis_plugins.shared.palette import color
from true_on_policy.verify.links import Evidence

ZERO = 1e-10  # where the logarithmic axis shows a difference of exactly 0
FLOOR = 1e-9  # a smaller difference that is not 0 is drawn here, apart from the equal tokens


def draw(off: Evidence, on: Evidence, title: str, path: Path) -> None:
    """Draw |engine decode - trainer| of each sampled token, stock and pinned side by side, to `path`.

    Raises:
        RecordError: matplotlib is not installed.
    """
    figure = optional("matplotlib.figure").Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, name, evidence in zip(panels, ("stock", "truly on policy"), (off, on), strict=True):
        gaps = (torch.cat(evidence.decode) - torch.cat(evidence.trainer_tempered)).abs()
        equal = int((gaps == 0).sum())
        drawn = torch.where(gaps == 0, ZERO, gaps.clamp(min=FLOOR))
        panel.plot(drawn, ".", markersize=2.5, color=color(name))
        panel.set(title=f"{name}: {equal} of {len(gaps)} equal", xlabel="sampled token", yscale="log")
        panel.set_yticks([ZERO, 1e-7, 1e-5, 1e-3, 1e-1], ["0", "1e-7", "1e-5", "1e-3", "1e-1"])
    panels[0].set(ylabel="|engine log-prob - trainer log-prob|", ylim=(ZERO / 3, 1))
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
