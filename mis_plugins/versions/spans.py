"""Which weight version wrote which tokens of one generation call, as the engine reports it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from mis_plugins.errors import InputError, shown

Run = tuple[int, int, int]
"""(version, start, stop) of a stretch of tokens that one version wrote."""
LONGEST = 18  # digits of a version, which tensors hold in 64 bits


def spans(meta_info: Mapping[str, Any], count: int) -> list[Run]:
    """(version, start, stop) of each stretch of the `count` tokens of one generation call, as SGLang reports them.

    SGLang's `weight_version`, a number as text, is the version that the host published last. `weight_versions` lists
    which version wrote which tokens, as read in SGLang 0.5.23.

    Raises:
        InputError: there are no spans, they leave out or repeat a token, or a version is no number.
    """
    if "weight_versions" not in meta_info:
        raise InputError(
            "meta_info: no weight_versions; weight_version alone names the version that wrote the last token of a "
            "call, not those before an update in its midst: use an SGLang that reports them"
        )
    reported, stretches, at = meta_info["weight_versions"], [], 0
    try:
        named = [(str(span["version"]), index(span["start"]), index(span["end"])) for span in reported]
    except (LookupError, TypeError):
        raise InputError(
            f"meta_info weight_versions: got {shown(reported)}; each span needs a version, a start and an end"
        ) from None
    for version, start, end in named:
        if not version.isdecimal() or len(version) > LONGEST:
            raise InputError(f"meta_info weight_versions: version {shown(version)} is not a number")
        if start != at or end < at:
            raise InputError(
                f"meta_info weight_versions: version {version} from {start} to {end}, where token {at} should follow"
            )
        stretches.append((int(version), start, end))
        at = end
    if at != count:
        raise InputError(f"meta_info weight_versions: up to token {at} of {count}")
    return [stretch for stretch in stretches if stretch[1] < stretch[2]]


def written_by(runs: Iterable[Run]) -> list[int]:
    """The version of each token.

    >>> written_by([(3, 0, 2), (4, 2, 3)])
    [3, 3, 4]
    """
    return [version for version, start, stop in runs for _ in range(start, stop)]
