"""What trainer and worker say to each other, through one pipe each way: in order, and whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lab.host.model.decoding import Drawn, Unfinished


@dataclass(frozen=True)
class Begin:
    """Begin these responses of a rollout, or go on with them, as one batch."""

    rollout: int
    responses: list[Unfinished]


@dataclass(frozen=True)
class Pause:
    """Finish the step, and generate no more until `Resume`; answered by `Paused`."""


@dataclass(frozen=True)
class Publish:
    """New weights, float32, by Hugging Face name."""

    version: int
    weights: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Resume:
    """Generate again after a pause."""


@dataclass(frozen=True)
class Stop:
    """End the process."""


Command = Begin | Pause | Publish | Resume | Stop


@dataclass(frozen=True)
class Tokens:
    """The tokens that one step drew, and the version of the weights that drew them."""

    drawn: Drawn
    version: int
    stale_cache: bool


@dataclass(frozen=True)
class Paused:
    """Generation has paused, and every token drawn so far was sent.

    aborted: numbers of the responses that the worker forgot.
    """

    aborted: frozenset[int]


@dataclass(frozen=True)
class Failed:
    """The worker ends. by_user: whether `reason` is an error that the user can mend, or else a traceback."""

    reason: str
    by_user: bool


@dataclass(frozen=True)
class Beat:
    """The worker has used processor time since it last said this; see `watchdog.py`.

    turns: how often it has begun to obey a command, to step, or to wait for either.
    """

    turns: int


Event = Tokens | Paused | Failed | Beat
