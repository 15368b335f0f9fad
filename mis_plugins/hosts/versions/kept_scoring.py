"""The trainer's log-probs over the kept sets: two functions of a host's own scoring, replaced in the trainer's process.

    get_responses                     called as before; says which tokens of a response each chunk of logits scores
    calculate_log_probs_and_entropy   called with logits that are as low as can be outside the sets

Every pass of the trainer goes through both: actor, reference, teacher, and either loss. The entropy stays that of the
whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mis_plugins.errors import InputError
from mis_plugins.hosts.batch import layout_of
from mis_plugins.hosts.host import Host
from mis_plugins.hosts.versions.kept import KeptSets
from mis_plugins.packing.layout import Span


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
