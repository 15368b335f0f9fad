"""A certificate and its picture: how far each sampled token's log-probs lie apart, with stock and with pinned kernels.

    python -m lab.certificate_picture PICTURE --engine sglang --trainer megatron ...

takes the arguments of `python -m true_on_policy verify` behind the name of the picture, and has its exit codes.
"""

from __future__ import annotations

if __name__ == "__main__":
    from mis_plugins.shared.shell import run_command

    run_command("lab.certificate_picture:main", extra="verify")

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from lab.palette import color
from mis_plugins.shared.files import check_writable
from true_on_policy.__main__ import add_verify
from true_on_policy.contract.model_config import check_model
from true_on_policy.verify.certificate import Evidence
from true_on_policy.verify.verification import EXIT, certified, title

ZERO = 1e-10  # where the logarithmic axis shows a difference of exactly 0
FLOOR = 1e-9  # a smaller difference that is not 0 is drawn here, apart from the equal tokens


def main(argv: list[str] | None = None) -> int:
    picture, *rest = sys.argv[1:] if argv is None else argv
    sys.argv[1:] = ["verify", *rest]  # a certificate states its command
    parser = argparse.ArgumentParser()
    add_verify(parser.add_subparsers())
    arguments = parser.parse_args(sys.argv[1:])
    check_model(arguments.model)
    check_writable(Path(picture), "PICTURE")
    certificate, off, on = certified(arguments)
    draw(off, on, title(arguments), Path(picture))
    return EXIT[certificate.verdict]


def draw(off: Evidence, on: Evidence, title: str, path: Path) -> None:
    """Draw |engine decode - trainer| of each sampled token, stock and pinned side by side, to `path`."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
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
