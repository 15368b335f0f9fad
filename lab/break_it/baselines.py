"""Room `baselines`: advantages from group baselines without rejected samples, against the oracle of `tests/`."""

from __future__ import annotations

from test_baselines import cases, judge

__all__ = ["cases", "judge"]
