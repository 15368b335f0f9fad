"""Kept sets: the tokens that top-p and top-k left the engine to sample each token of a response from.

SGLang returns the sets, and log-probs over them, where a request asks for its sampling mask. Its ordinary log-probs
are over the whole vocabulary. The trainer scores over the same sets by two functions of a host's own scoring, which are
replaced in the trainer's process:

    get_responses                     called as before; says which tokens of a response each chunk of logits scores
    calculate_log_probs_and_entropy   called with logits that are as low as can be outside the sets

Every pass of the trainer goes through both: actor, reference, teacher, and either loss. The entropy stays that of the
whole vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.batch import layout_of
from mis_plugins.hosts.host import Host, whole_number
from mis_plugins.packing.layout import Span

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
    def of(cls, packed: Mapping[str, Any]) -> "KeptSets":
        """Read what `packed` wrote."""
        return cls(*(np.frombuffer(packed[name], np.int32) for name in (KEPT_IDS, KEPT_SIZES)))


def asked(args: Any) -> bool:
    """Whether top-p or top-k cuts the vocabulary; raises ConfigError where SGLang would not return the kept sets."""
    top_p, given = getattr(args, "rollout_top_p", 1.0), getattr(args, "rollout_top_k", -1)
    top_k, limit = whole_number(given), getattr(args, LIMIT, None)
    if top_k <= 0 and top_p != 1:
        raise ConfigError(
            f"rollout_top_p: {top_p} with rollout_top_k: {given}; SGLang returns the tokens that top-p leaves only "
            "where top-k bounds their number: give --rollout-top-k 512, or --rollout-top-p 1"
        )
    if limit is not None and top_k > limit:
        raise ConfigError(
            f"rollout_top_k: {top_k}, and SGLang returns {limit} tokens at most: raise "
            "--sglang-sampling-mask-max-tokens"
        )
    return top_k > 0


def request(head: int) -> dict[str, Any]:
    """What a request asks for: log-probs of all tokens of a set where `head` is above 0, else of the sampled one."""
    return {"return_sampling_mask": True} | ({"sampling_logprobs_mode": "support"} if head else {})


def over_sets(meta_info: Mapping[str, Any], head: int) -> tuple[dict[str, Any], KeptSets]:
    """The `meta_info` of an answer with log-probs over the kept sets, and the sets.

    Args:
        head: above 0 where the tokens of each set also become the engine's likeliest, the likeliest first.

    Raises:
        InputError: the engine returned no sets, of another number of tokens, or without a token that it sampled.
    """
    rows: Sequence[Any] = meta_info.get("output_token_logprobs") or ()
    sets, values = meta_info.get(MASK) or (), meta_info.get(LOG_PROBS) or ()
    if not len(rows) == len(sets) == len(values):
        raise InputError(
            f"meta_info: {MASK} of {len(sets)} tokens, and the answer has {len(rows)}; top-p and top-k need an engine "
            "and a router that take return_sampling_mask, as SGLang 0.5.23 does; else give --rollout-top-p 1 "
            "--rollout-top-k -1"
        )
    renormalized: dict[str, Any] = {**meta_info, "output_token_logprobs": []}
    for position, (row, ids, value) in enumerate(zip(rows, sets, values, strict=True)):
        if row[1] not in ids:
            raise InputError(f"meta_info: {MASK} lacks the token {row[1]} that was sampled at {position}")
        value = value[ids.index(row[1])] if head else value
        renormalized["output_token_logprobs"].append([value, *row[1:]])
    if head:
        named = (zip(value, ids, strict=True) for value, ids in zip(values, sets, strict=True))
        renormalized["output_top_logprobs"] = [sorted(pairs, reverse=True) for pairs in named]
    sizes = np.fromiter(map(len, sets), np.int32)
    return renormalized, KeptSets(np.array([token for ids in sets for token in ids], np.int32), sizes)


class KeptScoring:
    """Kept sets of the rollout in training, by the tensor of a sequence's tokens, which the host hands on as it is."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._of_sequence, self._of_chunk = WeakIdKeyDictionary(), WeakIdKeyDictionary()

    def take(self, sequences: Sequence[Tensor], sets: Sequence[KeptSets]) -> None:
        """Keep the sets of each sequence for as long as its tokens live."""
        self._of_sequence.update(zip(sequences, sets, strict=True))

    def install(self) -> None:
        """Replace the two functions where the host's own scoring looks them up."""
        needs = self.host.needs
        for need, around in ((needs.responses, self._marking), (needs.log_probs_and_entropy, self._scoring)):
            module, name = need.owner()
            setattr(module, name, around(getattr(module, name)))

    def _marking(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def responses(
            logits: Tensor, *, args: Any, unconcat_tokens: Sequence[Tensor], **more: Any
        ) -> Iterator[tuple[Tensor, Tensor]]:
            layout = layout_of(args, more, self.host.parallel()[1])
            chunks = own(logits, args=args, unconcat_tokens=unconcat_tokens, **more)
            for i, (sequence, (scored, tokens)) in enumerate(zip(unconcat_tokens, chunks, strict=True)):
                if sequence not in self._of_sequence:
                    raise InputError(
                        f"sequence {i} of a micro-batch: the trainer has no kept sets of it, and would score the whole "
                        "vocabulary; set --rollout-top-p 1 --rollout-top-k -1"
                    )
                self._of_chunk[tokens] = self._of_sequence[sequence], layout.pieces(i)
                yield scored, tokens

        return responses

    def _scoring(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def calculate(
            logits: Tensor, tokens: Tensor, group: Any, with_entropy: bool = False, *rest: Any, **more: Any
        ) -> Any:
            sets, pieces = self._of_chunk[tokens]
            tp = self.host.parallel()[0].tp
            first = 0 if tp is None else tp.rank() * logits.shape[-1]
            low = logits.masked_fill(~columns(sets, pieces, first, logits), torch.finfo(logits.dtype).min)
            log_probs, _ = own(low, tokens, group, False, *rest, **more)
            return log_probs, own(logits, tokens, group, True, *rest, **more)[1] if with_entropy else None

        return calculate


def columns(kept: KeptSets, pieces: Sequence[Span], first: int, logits: Float[Tensor, "T V"]) -> Bool[Tensor, "T V"]:
    """Which tokens `first` to `first + V` of the vocabulary are in the set of each token of these pieces of a response.

    A token that no engine sampled has an empty set, and is scored over the whole vocabulary.
    """
    sizes, ids = torch.tensor(kept.sizes).long(), torch.tensor(kept.ids).long()
    ends = [0, *accumulate(kept.sizes.tolist())]
    here = torch.cat([sizes[start:stop] for start, stop in pieces])
    if len(here) != len(logits):
        raise InputError(f"kept sets of {len(here)} tokens of a response, and logits score {len(logits)}")
    column = torch.cat([ids[ends[start] : ends[stop]] for start, stop in pieces]) - first
    row, own = torch.repeat_interleave(here), (column >= 0) & (column < logits.shape[-1])
    there = partial(torch.Tensor.to, device=logits.device, non_blocking=True)  # waits for no kernel
    table = there(here == 0)[:, None].repeat(1, logits.shape[-1])
    table[there(row[own]), there(column[own])] = True
    return table
