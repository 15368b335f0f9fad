"""Is this kernel batch-invariant, here and now? A row alone against the same row in a batch, by bytes."""

from __future__ import annotations

from true_on_policy.contract import Contract


def probe(contract: Contract) -> None: ...
