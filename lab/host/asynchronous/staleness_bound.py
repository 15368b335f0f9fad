"""The bound on the age of tokens in training, held by when a rollout may begin.

Rollouts are trained on in order, rollout k at version k. A rollout that begins at version v has no token of an earlier
version, however often the weights move meanwhile. Rollout k may therefore begin once k - v is within the bound, and no
token of rollout k exceeds the bound. AReaL counts samples instead: bound + v + 1 batches may have begun at version v
(`max_head_offpolicyness`). Fu et al. 2025, "AReaL", arxiv.org/abs/2505.24298, section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from mis_plugins.errors import ConfigError


@dataclass(frozen=True)
class HeadOffpolicyness:
    """The bound on the age of tokens in training.

    bound: the largest age of a token in training; 0 is synchronous.
    """

    bound: int

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ConfigError(f"{{max_head_offpolicyness}}: got {self.bound}; give 0, which is synchronous, or more")

    def admitted(self, begun: int, version: int) -> range:
        """Numbers of the rollouts that may begin at `version`, when the first `begun` rollouts have begun."""
        return range(begun, max(begun, version + self.bound + 1))
