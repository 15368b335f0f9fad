"""The shelf of Miles, in the process of its rollouts, which answers the trainer while a rollout runs."""

from __future__ import annotations

from typing import Any

from mis_plugins.hosts.versions.numbering import Numbering
from mis_plugins.hosts.versions.shelf import Shelf, Waiting

SHELF = Shelf()
NUMBERING = Numbering(lambda: SHELF)


def waiting(manager: Any, version: int, trained: int) -> Waiting:
    """`Shelf.waiting` of the process in which Ray calls this."""
    return SHELF.waiting(version, trained)
