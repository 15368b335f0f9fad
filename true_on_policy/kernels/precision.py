"""Keep float32 products and convolutions off TF32 (10 bits of mantissa), which several switches allow.

Since torch 2.9 the `fp32_precision` of each kind of operation decides, and the older switches write to it.
Where old and new disagree, torch raises when the older switch is read: the pin then leaves the older switch
alone and sets the newer switches.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from true_on_policy.kernels.probes import Failure, compare
from true_on_policy.kernels.provider import Undo, undone_on_error

FINE = 1 + 2.0**-12  # takes 12 bits of mantissa
LOSSY = (True, "tf32", "bf16", "high", "medium")


@dataclass(frozen=True)
class Switch:
    """A switch is one place where torch allows TF32.

    get, put: read and write the switch; `get` raises AttributeError or RuntimeError where this torch lacks it or
        cannot tell its value.
    full: the value that forbids TF32.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    full: Any


def _attribute(owner: str, name: str, full: Any) -> Switch:
    module = partial(attrgetter(owner), torch.backends)
    put = lambda value: setattr(module(), name, value)  # noqa: E731
    return Switch(f"torch.backends.{owner}.{name}", lambda: getattr(module(), name), put, full)


# A write to one switch changes the switches below it too: `allow_tf32` turns "medium" into "high".
SWITCHES = (
    _attribute("cuda.matmul", "allow_tf32", False),
    _attribute("cudnn", "allow_tf32", False),
    Switch(
        "torch.set_float32_matmul_precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "highest",
    ),
    *(
        _attribute(owner, "fp32_precision", "ieee")
        for owner in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")
    ),
)


def settings() -> dict[str, str]:
    """Name the switches that allow TF32 now."""
    allowing = [switch.name for switch, value in _readable() if value in LOSSY]
    return {"torch: TF32 allowed by": ", ".join(allowing) or "nothing"}


def pin() -> Undo:
    """Forbid TF32 at every switch, and return the undo; raises PinError, undone, where a switch still allows TF32."""
    states = _readable()

    def undo() -> None:
        for switch, value in states:
            switch.put(value)

    with undone_on_error(undo, "torch: TF32 cannot be switched off"):
        for switch, _ in states:
            switch.put(switch.full)
        if (allowed := settings()["torch: TF32 allowed by"]) != "nothing":
            raise RuntimeError(f"still allowed by {allowed}")
    return undo


@torch.no_grad()
def probe(where: torch.device) -> Iterator[Failure]:
    """Probe a float32 bmm that needs 12 bits of mantissa; bmm is the product that no contract replaces."""
    x, identity = torch.full((1, 64, 64), FINE, device=where), torch.eye(64, device=where)[None]
    yield from compare("bmm in float32", (64, 64), "times the identity and itself", torch.bmm(x, identity), x)


def _readable() -> list[tuple[Switch, Any]]:
    """List the switches that can be read, with their values."""
    readable = []
    for switch in SWITCHES:
        with suppress(AttributeError, RuntimeError):
            readable.append((switch, switch.get()))
    return readable
