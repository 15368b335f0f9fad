"""What a file holds in place of a key that is missing: the nearest spelling, for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from reprlib import repr as shortened

SHOWN = 12  # keys of a file
ALIKE = 0.6  # share of letters in common, as `difflib` counts them
BEHAVIOR, PROXIMAL = ("behaviour rollout engine sampler sampling mu inference", "old trainer train training actor pi")
OTHERS = {"ref", "reference", "teacher", "critic"}
SPELLED = 0.7  # the same of two spellings of one word
ONE_WORD: dict[str, str] = {
    **dict.fromkeys(BEHAVIOR.split(), "behavior"),
    **dict.fromkeys(PROXIMAL.split(), "proximal"),
    **dict.fromkeys(("logprobs", "logprob", "logps", "logp"), "log probs"),
    "prob": "probs",
}  # fmt: skip


def nearest(needed: str, names: Iterable[str]) -> str | None:
    """The key of `names` that is spelled nearest to `needed`, whatever the order of its words; None of no kin.

    Of two keys of kin one has all words of the other, and the last one of `needed`, as what it counts. A key of another
    model's log-probs, as the reference's, is of no kin.
    """
    words, asked = {key: _words(key) for key in names}, _words(needed).split()
    noun = _words(needed.rpartition("_")[2]).split()
    rated = (
        (SequenceMatcher(None, _words(needed), spelled).ratio(), key)
        for key, spelled in words.items()
        if OTHERS.isdisjoint(spelled.split())
        and (_are_among(spelled.split(), asked) or _are_among(asked, spelled.split()))
        and _are_among(noun, spelled.split())
    )
    rate, key = max(rated, default=(0.0, ""))
    return key if rate >= ALIKE else None


def _are_among(words: Sequence[str], others: Sequence[str]) -> bool:
    return all(get_close_matches(word, others, 1, SPELLED) for word in words)


def _words(key: str) -> str:
    words = re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key[:200]).lower())
    spelled = [ONE_WORD[word] if word in ONE_WORD else word for word in words]
    return " ".join(sorted(" ".join(spelled).split()))


def lacking(needed: Sequence[str], names: Iterable[str]) -> str:
    """What is missing among the keys `names`, the nearest spelling of each missing key, and the keys, in words."""
    keys = list(map(str, names))
    missing = [key for key in needed if key not in keys]
    near: dict[str, str] = {}
    for key in missing:
        if close := nearest(key, set(keys) - {*needed, *near.values()}):
            near[key] = close
    renamed = ", ".join(f"{shortened(close)} -> {key}" for key, close in near.items())
    shown = ", ".join(map(shortened, keys[:SHOWN])) + (", ..." if len(keys) > SHOWN else "")
    return f"no {' and no '.join(missing)}; found {shown or 'no key'}" + (f"; rename {renamed}" if renamed else "")
