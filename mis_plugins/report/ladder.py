"""How large a mismatch is, beside that of one real model, which `explain/rungs.py` records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mis_plugins.explain.rungs import Rung, record

AS_MUCH = 3.0  # within this factor of a rung a mismatch counts as that rung's


def nearest(kl_k3: float, rungs: Sequence[Rung]) -> Rung:
    """The rung whose k3 is nearest by its logarithm."""
    return min(rungs, key=lambda rung: abs(math.log(max(kl_k3, 1e-12) / rung.k3)))


def in_words(kl_k3: float) -> str:
    """Where a kl_k3 stands on the ladder."""
    if kl_k3 <= 1e-10:
        return (
            "Both policies agree to rounding: there is nothing to correct, or the run stored the engine's log-probs as "
            "the trainer's, as a bypass does; then log the trainer's own."
        )
    rungs = record().steps
    rung = nearest(kl_k3, rungs)
    if rung.k3 / AS_MUCH <= kl_k3 <= AS_MUCH * rung.k3:
        return f"A real model shows as much ({rung.k3:.2g}) with an engine in {rung.words}."
    below = [one for one in rungs if one.k3 < kl_k3]
    above = [one for one in rungs if one.k3 > kl_k3]
    shown = f"a real model shows with an engine in {rung.name}"
    if not below:
        return f"The mismatch is {rung.k3 / kl_k3:.0f} times less than {shown}."
    if not above:
        return f"The mismatch is {kl_k3 / rung.k3:.0f} times what {shown}."
    low, high = below[-1], above[0]
    return (
        f"The mismatch lies between what a real model shows with an engine in {low.name} ({low.k3:.2g}) and in "
        f"{high.name} ({high.k3:.2g})."
    )
