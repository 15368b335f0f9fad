"""How far the tokens of a rollout may lag behind the weights that train on them, kept by when a rollout may begin.

Rollouts are trained on in order, rollout k at version k. What begins at version v has no token older than v, however
long it takes and however often the weights move meanwhile: so rollout k may begin as soon as k - v is within the bound,
and never has a token of an age above it. AReaL counts the same in samples, of which bound + v + 1 batches may have been
begun at version v: `max_head_offpolicyness`. Fu et al. 2025, "AReaL", arxiv.org/abs/2505.24298, section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mis_plugins.errors import ConfigError


@dataclass(frozen=True)
class HeadOffpolicyness:
    """bound: the largest age of a token in training; 0 is synchronous."""

    bound: int

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ConfigError(
                f"{{max_head_offpolicyness}}: got {self.bound}; give 0, which is synchronous, or more"
            )

    def admitted(self, begun: int, version: int) -> range:
        """The rollouts that may begin at `version`, of which the first `begun` have."""
        return range(begun, max(begun, version + self.bound + 1))
