"""A response while it grows, and which weight version wrote each of its tokens.

The weights may move in mid-sequence, and a partial response may wait and be resumed by later weights. What is written
stays written: tokens are appended, and a log-prob under the next version is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mis_plugins.errors import InputError
from mis_plugins.versions.segment_wise import NO_VERSION, Written


@dataclass(frozen=True)
class Response:
    """One response, a number a token.

    prompt: the tokens before it, of no version.
    log_probs: under the policy that sampled the token; 0 of a tool's.
    versions: of the weights that wrote it (`output_versions`); `NO_VERSION` of a tool's.
    recomputed: log pi_{v+1} of a token of version v, None until it is stored.
    stale_cache: whether the token was sampled over keys and values that earlier weights left in the cache, so that pi_v
        recomputed from the tokens alone is not quite what sampled it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    recomputed: tuple[float | None, ...] = ()
    stale_cache: tuple[bool, ...] = ()

    @property
    def newest(self) -> int:
        """The last version that wrote a token of it; `NO_VERSION` before the first."""
        return max(self.versions, default=NO_VERSION)

    def append(
        self, tokens: Sequence[int], log_probs: Sequence[float], version: int, stale_cache: bool = False
    ) -> Response:
        """The same with what one version sampled next: to be called with many tokens, as it copies the others.

        Raises:
            InputError: a version before the last, or below 0; a log-prob too few or too many.
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
        """The same with what no policy sampled next: the answer of a tool."""
        return self._extended(tokens, [0.0] * len(tokens), NO_VERSION, False)

    def lacking(self, version: int) -> list[int]:
        """Where tokens of `version` wait for their log-prob under the next."""
        pairs = zip(self.versions, self.recomputed, strict=True)
        return [
            i for i, (wrote, stored) in enumerate(pairs) if wrote == version > NO_VERSION and stored is None
        ]

    def stored(self, positions: Sequence[int], log_probs: Sequence[float]) -> Response:
        """The same with these log-probs under the next version."""
        recomputed = list(self.recomputed)
        for position, log_prob in zip(positions, log_probs, strict=True):
            assert recomputed[position] is None and self.versions[position] > NO_VERSION
            recomputed[position] = log_prob
        return replace(self, recomputed=tuple(recomputed))

    def written(self, current: int) -> Written:
        """As tensors on the host, for a trainer at version `current`."""
        recomputed = [torch.nan if value is None else value for value in self.recomputed]
        return Written(
            torch.tensor(self.versions, dtype=torch.int64),
            torch.tensor(recomputed, dtype=torch.float32),
            current,
        )

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(version, start, stop) of each stretch of tokens that one version wrote without a break."""
        start = 0
        for stop in range(1, len(self.versions) + 1):
            if stop == len(self.versions) or self.versions[stop] != self.versions[start]:
                yield self.versions[start], start, stop
                start = stop

    def _extended(
        self, tokens: Sequence[int], log_probs: Sequence[float], version: int, stale_cache: bool
    ) -> Response:
        count = len(tokens)
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            log_probs=(*self.log_probs, *log_probs),
            versions=(*self.versions, *(version,) * count),
            recomputed=(*self.recomputed, *(None,) * count),
            stale_cache=(*self.stale_cache, *(stale_cache,) * count),
        )


def spans(meta_info: Mapping[str, Any], count: int) -> list[tuple[int, int, int]]:
    """(version, start, stop) of each stretch of the `count` tokens of one generation call, as SGLang reports them.

    SGLang numbers the weights by what the host published last (`weight_version`, a number as text) and lists in
    `weight_versions` which of the tokens it wrote with which: seen in 0.5.23. `weight_version` alone names the last.

    Raises:
        InputError: no spans, which do not follow one another from the first token to the last, or a version that is no
            number.
    """
    if "weight_versions" not in meta_info:
        raise InputError(
            "meta_info: no weight_versions; weight_version alone names the version that wrote the last token of a "
            "call, not those before an update in its midst: use an SGLang that reports them"
        )
    found, at = [], 0
    for span in meta_info["weight_versions"]:
        if not str(span["version"]).isdigit():
            raise InputError(f"meta_info weight_versions: version {span['version']!r} is not a number")
        if span["start"] != at or span["end"] < at:
            raise InputError(f"meta_info weight_versions: {span} where token {at} should follow")
        found.append((int(span["version"]), at, span["end"]))
        at = span["end"]
    if at != count:
        raise InputError(f"meta_info weight_versions: up to token {at} of {count}")
    return [one for one in found if one[1] < one[2]]
