"""Progress of work that takes longer than a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from mis_plugins.shared.terminal import steered

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


def tracked(items: Sequence[T], what: str, silent: bool = False) -> Iterable[T]:
    """Yield the items, under a bar that rich draws on stdout."""
    from rich.console import Console  # of the extra `local`
    from rich.progress import track

    return track(items, what, console=Console(file=steered(sys.stdout)), disable=silent)
