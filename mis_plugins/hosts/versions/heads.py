"""The engine's likeliest tokens at each position: asked of SGLang, kept on the sample, and packed for the trainer.

A head of k tokens is 8 k bytes a token of the response: an id in int32 and a log-prob in float32 for each. Bytes travel
in the sample's note (`samples.py`), because a host packs the keys of a fixed list alone.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mis_plugins.config import reading
from mis_plugins.errors import InputError, shown
from mis_plugins.hosts.host import HEAD_IDS, HEAD_LOG_PROBS
from mis_plugins.hosts.needs import Need

HEAD = "output_head"  # the attribute of a sample
LARGEST_MASS = 1.01  # of the probabilities that an engine names at a position, which it may have rounded
NOT_NAMED = -1, -np.inf  # id and log-prob of an entry beyond what the engine named


@dataclass(frozen=True)
class NamedTokens:
    """Tokens of the vocabulary that the engine named at each position of a response, k a position.

    ids: `[response, k]` int32, -1 where fewer were named.
    log_probs: `[response, k]` float32 as the engine sampled from them, -inf where fewer were named.
    """

    ids: np.ndarray
    log_probs: np.ndarray

    @classmethod
    def none(cls, positions: int, k: int) -> "NamedTokens":
        """Positions at which the engine named no token."""
        return cls(*(np.full((positions, k), fill, kind) for fill, kind in zip(NOT_NAMED, KINDS.values(), strict=True)))

    @classmethod
    def read(cls, meta_info: Mapping[str, Any], positions: int, k: int) -> "NamedTokens":
        """What the `meta_info` of an answer names: pairs of a log-prob and an id at each position.

        Raises:
            InputError: the engine named no tokens for these positions, a token twice, or what no distribution can have.
        """
        rows: Sequence[Any] = meta_info.get("output_top_logprobs") or ()
        if len(rows) != positions:
            raise InputError(
                f"meta_info: output_top_logprobs of {len(rows)} tokens, and the answer has {positions}; mis.center "
                "needs an engine that takes top_logprobs_num"
            )
        if positions and not any(rows):
            raise InputError(
                f"meta_info: output_top_logprobs names no token at any of {positions} positions, and mis.center would "
                "leave all of them out of the loss; let the engine answer top_logprobs_num"
            )
        named = cls.none(positions, k)
        for position, row in enumerate(rows):
            try:
                for place, (log_prob, token, *_) in enumerate(list(row or [])[:k]):
                    named.ids[position, place], named.log_probs[position, place] = index(token), float(log_prob)
            except (TypeError, ValueError, OverflowError):
                raise InputError(
                    f"meta_info: output_top_logprobs[{position}]: got {shown(row)}; each entry needs a log-prob, and "
                    "the id of a token"
                ) from None
        named.check()
        return named

    def check(self) -> None:
        """Refuse what no distribution over tokens can have: centering would add up a token's probability twice."""
        ids = np.sort(self.ids, axis=1)
        twice = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).any(1)
        mass = np.exp(np.minimum(self.log_probs, 1.0), dtype=np.float64).sum(1)
        for fault, wrong in (("a token twice", twice), ("probabilities of more than 1", mass > LARGEST_MASS)):
            if wrong.any():
                raise InputError(f"meta_info: output_top_logprobs[{int(wrong.argmax())}] names {fault}")

    def behind(self, earlier: "NamedTokens | None", before: int) -> "NamedTokens":
        """The tokens of the first `before` positions, which earlier calls may have left unnamed, and then these."""
        width = self.ids.shape[1]
        named = NamedTokens.none(0, width) if earlier is None else earlier
        gap = NamedTokens.none(before - len(named.ids[:before]), width)
        ids = np.concatenate([named.ids[:before], gap.ids, self.ids])
        return NamedTokens(ids, np.concatenate([named.log_probs[:before], gap.log_probs, self.log_probs]))

    def __len__(self) -> int:
        return len(self.ids)

    def packed(self) -> dict[str, bytes]:
        return {HEAD_IDS: self.ids.tobytes(), HEAD_LOG_PROBS: self.log_probs.tobytes()}


KINDS = {HEAD_IDS: np.int32, HEAD_LOG_PROBS: np.float32}


def unpacked(packed: Mapping[str, Any], positions: int) -> dict[str, Tensor]:
    """The two tensors that `NamedTokens.packed` wrote, `[response, k]`, by the keys of the loss hook's batch."""
    columns = {name: np.frombuffer(packed[name], kind).copy() for name, kind in KINDS.items() if name in packed}
    return {name: torch.from_numpy(x.reshape(positions, -1 if positions else 1)) for name, x in columns.items()}


def wanted(args: Any, flag: str = "") -> int:
    """How many tokens our hooks ask the engine to name at each position; 0 where nothing centers, or the host asks.

    Args:
        flag: the argument with which the host itself asks for them; empty where it has none.
    """
    config = reading.from_args(args)
    asks_itself = bool(flag and getattr(args, flag, 0))
    return 0 if config.center is None or asks_itself else config.center.top_k


def extend(sample: Any, meta_info: Mapping[str, Any], before: int, k: int) -> None:
    """Add the tokens that one answer names to the sample, whose response had `before` tokens before the answer."""
    new = NamedTokens.read(meta_info, sample.response_length - before, k)
    setattr(sample, HEAD, new.behind(getattr(sample, HEAD, None), before))


ASKED: ContextVar[int] = ContextVar("top_logprobs_num", default=0)
"""How many tokens the requests of the task that runs shall ask for."""


def ask_through(post: Need) -> None:
    """Replace the host's function that posts a request, once, so that it asks for as many tokens as `ASKED` says."""
    module, name = post.owner()
    own = getattr(module, name)
    if hasattr(own, "asks"):
        return

    @wraps(own)
    async def asking(url: str, payload: Any, *rest: Any, **more: Any) -> Any:
        k = ASKED.get()
        return await own(url, {**payload, "top_logprobs_num": k} if k else payload, *rest, **more)

    asking.asks = True  # type: ignore[attr-defined]
    setattr(module, name, asking)
