"""Tokens by the weight version that wrote them.

`spans` reads which version wrote which tokens of one generation call, as the engine reports it. `run_lengths` makes a
short list of the versions of a response, which travels with it.

A `Request` asks for log pi_{v+1} of tokens that version v wrote. Nobody can score them after the next update. Before
the weights move on from V, pi_V scores the tokens of V - 1 in every response that is not in training yet, running or
finished. Tokens of V are scored one update later. A token that is trained on at age 1 needs no stored score: the
trainer's own log-prob is log pi_{v+1}.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from mis_plugins.errors import ConfigError, InputError, shown

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


@dataclass(frozen=True)
class Request:
    """The tokens of one response that are to be scored.

    tokens: prompt and response up to the last wanted token, whose log-prob no later token can change.
    positions: where the wanted tokens stand in the response.
    """

    number: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of tokens to score: all from the first wanted token to the last."""
        return self.positions[-1] - self.positions[0] + 1

    def wanted(self, log_probs: Sequence[float]) -> list[float]:
        """Pick the wanted tokens' log-probs out of all scored log-probs."""
        if len(log_probs) != self.count:
            raise InputError(
                f"score: {len(log_probs)} log-probs for a sequence of which {self.count} were asked for; return those "
                "of its last tokens"
            )
        return [float(log_probs[position - self.positions[0]]) for position in self.positions]


def batches(waiting: Sequence[Request], budget: int) -> list[list[Request]]:
    """Pack requests into batches by first fit: at most `budget` tokens each, or one sequence that is longer."""
    if budget < 1:
        raise ConfigError(f"recompute budget: got {budget} tokens; give at least 1")
    packed: list[list[Request]] = []
    room: list[int] = []
    for request in waiting:
        size = len(request.tokens)
        place = next((i for i, left in enumerate(room) if left >= size), len(packed))
        if place == len(packed):
            packed.append([])
            room.append(budget)
        packed[place].append(request)
        room[place] -= size
    return packed


def run_lengths(values: Iterable[int]) -> list[int]:
    """Value and length of each run of equal neighbours, over and over in one list.

    >>> run_lengths([4, 4, 5])
    [4, 2, 5, 1]
    """
    runs = ((value, len(list(run))) for value, run in itertools.groupby(values))
    return [*itertools.chain.from_iterable(runs)]


def from_run_lengths(runs: Sequence[int]) -> list[int]:
    """The values from which `run_lengths` made runs.

    >>> from_run_lengths([4, 2, 5, 1])
    [4, 4, 5]
    """
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return [value for value, count in pairs for _ in range(count)]
