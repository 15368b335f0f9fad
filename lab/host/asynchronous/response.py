"""A response while it grows, and which weight version wrote each of its tokens.

The weights may move in mid-sequence, and a partial response may wait and be resumed by later weights. Tokens are only
appended, and a log-prob under the next version is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mis_plugins.errors import InputError
from mis_plugins.versions.segment_wise import NO_VERSION, Written


@dataclass(frozen=True)
class Response:
    """One response: each field but `prompt` has one entry a token.

    prompt: the tokens before the response, which no version wrote.
    log_probs: log-prob under the policy that sampled the token; 0 where a tool wrote the token.
    versions: the weight version that wrote the token (`output_versions`); `NO_VERSION` where a tool did.
    recomputed: log pi_{v+1} of a token of version v; None until it is stored.
    stale_cache: whether the token was sampled over keys and values that earlier weights left in the cache. Recomputing
        pi_v from the tokens alone then gives not quite the policy that sampled.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    recomputed: tuple[float | None, ...] = ()
    stale_cache: tuple[bool, ...] = ()

    @property
    def newest(self) -> int:
        """The latest version that wrote a token of the response; `NO_VERSION` before the first token."""
        return max(self.versions, default=NO_VERSION)

    def append(
        self, tokens: Sequence[int], log_probs: Sequence[float], version: int, stale_cache: bool = False
    ) -> Response:
        """Append tokens that one version sampled. Give many tokens at a time: each call copies the whole response.

        Raises:
            InputError: `version` is below 0 or before the latest one, or the log-probs are not one a token.
        """
        if len(tokens) != len(log_probs):
            raise InputError(f"{len(tokens)} tokens with {len(log_probs)} log-probs; give each token one")
        if version < max(self.newest, 0):
            raise InputError(
                f"version {version} after version {self.newest}: versions start at 0 and never go back; number the "
                "weights by their updates"
            )
        return self._extended(tokens, log_probs, version, stale_cache)

    def observe(self, tokens: Sequence[int]) -> Response:
        """Append tokens that no policy sampled: the answer of a tool."""
        return self._extended(tokens, [0.0] * len(tokens), NO_VERSION, False)

    def lacking(self, version: int) -> list[int]:
        """Positions of the tokens of `version` that wait for their log-prob under the next version."""
        pairs = zip(self.versions, self.recomputed, strict=True)
        return [i for i, (wrote, stored) in enumerate(pairs) if wrote == version > NO_VERSION and stored is None]

    def stored(self, positions: Sequence[int], log_probs: Sequence[float]) -> Response:
        """Store the log-probs of some tokens under the next version."""
        recomputed = list(self.recomputed)
        for position, log_prob in zip(positions, log_probs, strict=True):
            assert recomputed[position] is None and self.versions[position] > NO_VERSION
            recomputed[position] = log_prob
        return replace(self, recomputed=tuple(recomputed))

    def written(self, current: int) -> Written:
        """Versions and stored log-probs as tensors on the host, for a trainer at version `current`."""
        return written(self.versions, self.recomputed, current)

    def _extended(self, tokens: Sequence[int], log_probs: Sequence[float], version: int, stale_cache: bool) -> Response:
        count = len(tokens)
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            log_probs=(*self.log_probs, *log_probs),
            versions=(*self.versions, *(version,) * count),
            recomputed=(*self.recomputed, *(None,) * count),
            stale_cache=(*self.stale_cache, *(stale_cache,) * count),
        )


def written(versions: Sequence[int], recomputed: Sequence[float | None], current: int) -> Written:
    """Versions and stored log-probs of tokens as tensors on the host, for a trainer at version `current`."""
    stored = [torch.nan if value is None else value for value in recomputed]
    return Written(torch.tensor(versions, dtype=torch.int64), torch.tensor(stored, dtype=torch.float32), current)
