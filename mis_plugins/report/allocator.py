"""Keep memory that each batch frees and asks for again, in place of handing it back to the kernel."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT, LARGEST = (
    256 * 1024**2,
    32 * 1024**2,
)  # bytes at the end of the heap; largest piece that is taken from there


def keep_freed_memory() -> None:
    """Have glibc keep up to `KEPT` freed bytes: new pages cost as much time as a batch's numbers."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return
    mallopt(MMAP_THRESHOLD, LARGEST)
    mallopt(TRIM_THRESHOLD, KEPT)
