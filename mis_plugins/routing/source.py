"""Where a host keeps the routes of its engine until the trainer's routers consume them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Source(Protocol):
    """The queues of recorded routes of one host; `mis_plugins/hosts/replay.py` has one for each host."""

    def replaying(self) -> bool:
        """Whether routers should consume recorded rows now."""
        ...

    def has_queue(self, router: Any) -> bool:
        """Whether recorded rows are kept for this router at all."""
        ...

    def recorded(self, router: Any) -> int:
        """How many micro-batches are recorded for this router."""
        ...

    def consumed(self, router: Any) -> int | None:
        """How many of them it has consumed; None where the host does not count them."""
        ...

    def rows(self, router: Any) -> Tensor | None:
        """The rows that this router should consume next, on any device; None where there are none."""
        ...

    def passing_over(self, router: Any) -> AbstractContextManager[None]:
        """Let the router route by its own gates within the block, and count its next rows as consumed."""
        ...
