"""Kept sets: the tokens that top-p and top-k left the engine to sample each token of a response from.

SGLang returns the sets, and log-probs over them, where a request asks for its sampling mask. Its ordinary log-probs
are over the whole vocabulary. `kept_scoring.py` has the trainer score over the same sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mis_plugins.errors import ConfigError, InputError

KEPT = "output_kept"  # the attribute of a sample
KEPT_IDS, KEPT_SIZES = "rollout_kept_ids", "rollout_kept_sizes"
MASK, LOG_PROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
LIMIT = "sglang_sampling_mask_max_tokens"


@dataclass(frozen=True)
class KeptSets:
    """The kept sets of one response.

    ids: token ids in int32, set after set.
    sizes: `[response]` int32, the number of tokens in each set.
    """

    ids: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def packed(self) -> dict[str, bytes]:
        return {KEPT_IDS: self.ids.tobytes(), KEPT_SIZES: self.sizes.tobytes()}

    @classmethod
    def of(cls, packed: Mapping[str, Any]) -> KeptSets:
        """Read what `packed` wrote."""
        return cls(*(np.frombuffer(packed[name], np.int32) for name in (KEPT_IDS, KEPT_SIZES)))


def asked(args: Any) -> bool:
    """Whether the engine samples from a part of the vocabulary."""
    top_p, top_k = getattr(args, "rollout_top_p", 1.0), getattr(args, "rollout_top_k", -1)
    limit = getattr(args, LIMIT, None)
    if top_k <= 0 and top_p != 1:
        raise ConfigError(
            f"rollout_top_p: {top_p} with rollout_top_k: {top_k}; SGLang returns the tokens that top-p leaves only "
            "where top-k bounds their number: give --rollout-top-k 512, or --rollout-top-p 1"
        )
    if limit is not None and top_k > limit:
        raise ConfigError(
            f"rollout_top_k: {top_k}, and SGLang returns {limit} tokens at most: raise "
            "--sglang-sampling-mask-max-tokens"
        )
    return top_k > 0


def request(head: int) -> dict[str, Any]:
    """What a request asks for.

    Args:
        head: above 0 where log-probs of all tokens of a set are wanted, not of the sampled one alone.
    """
    return {"return_sampling_mask": True} | ({"sampling_logprobs_mode": "support"} if head else {})


def over_sets(meta_info: Mapping[str, Any], head: int) -> tuple[dict[str, Any], KeptSets]:
    """The `meta_info` of an answer with log-probs over the kept sets, and the sets.

    Args:
        head: above 0 where the tokens of each set also become the engine's likeliest, the likeliest first.
    """
    rows: Sequence[Any] = meta_info.get("output_token_logprobs") or ()
    sets, values = meta_info.get(MASK) or (), meta_info.get(LOG_PROBS) or ()
    if not len(rows) == len(sets) == len(values):
        raise InputError(
            f"meta_info: {MASK} of {len(sets)} tokens, and the answer has {len(rows)}; top-p and top-k need an engine "
            "and a router that take return_sampling_mask, as SGLang 0.5.23 does; else give --rollout-top-p 1 "
            "--rollout-top-k -1"
        )
    told: dict[str, Any] = {**meta_info, "output_token_logprobs": []}
    for position, (row, ids, value) in enumerate(zip(rows, sets, values, strict=True)):
        if row[1] not in ids:
            raise InputError(f"meta_info: {MASK} lacks the token {row[1]} that was sampled at {position}")
        value = value[ids.index(row[1])] if head else value
        told["output_token_logprobs"].append([value, *row[1:]])
    if head:
        named = (zip(value, ids, strict=True) for value, ids in zip(values, sets, strict=True))
        told["output_top_logprobs"] = [sorted(pairs, reverse=True) for pairs in named]
    sizes = np.fromiter(map(len, sets), np.int32)
    return told, KeptSets(np.array([token for ids in sets for token in ids], np.int32), sizes)
