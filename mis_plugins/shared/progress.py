"""Progress of work that takes longer than a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
SECONDS = 2.0


def told(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items, and print every two seconds on stderr how many of them are done."""
    said = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - said >= SECONDS:
            print(f"{done} of {len(items)} {what}", file=sys.stderr, flush=True)
            said = time.monotonic()
        yield item
