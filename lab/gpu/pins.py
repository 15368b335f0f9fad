"""Switch the contract's kernels on without the probes of `pinned`, which have their own section."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lab.gpu.plan import CONTRACT
from true_on_policy.kernels import gpu


@contextmanager
def installed() -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(gpu.install(CONTRACT))
        yield
