"""The chain from the trainer's log-probs to the engine's sampling log-probs, link by link, by bytes.

(1) trainer: a sequence alone == in any batch; (2) engine prefill == trainer; (3) engine decode == engine prefill. The
engine's prefill knows no temperature, so (3) covers temperature 1 alone. The conclusion, engine decode == trainer, is
therefore compared at every temperature as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from true_on_policy.bitwise import coordinate, first_mismatch
from true_on_policy.engines.protocol import Sample

LogProbs = list[Float32[Tensor, "_"]]  # one tensor a sequence


@dataclass
class Evidence:
    """The evidence of a verification: log-probs of one set of sampled tokens, by who computed them and how.

    Attributes:
        samples: the tokens that the engine decoded, with its log-probs.
        batches: how many requests the engine was given in each call.
        prefill: the engine's log-probs of each whole sequence at once, at temperature 1.
        trainer: the trainer's log-probs of each sequence alone, at temperature 1.
        trainer_tempered: the trainer's log-probs of each sequence alone, at the temperature of its request.
        packed: the trainer's log-probs of several sequences in a batch, at temperature 1, by the way of batching.
    """

    samples: list[Sample] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    prefill: LogProbs = field(default_factory=list)
    trainer: LogProbs = field(default_factory=list)
    trainer_tempered: LogProbs = field(default_factory=list)
    packed: dict[str, LogProbs] = field(default_factory=dict)

    @property
    def decode(self) -> LogProbs:
        return [sample.log_probs for sample in self.samples]

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def __iadd__(self, other: Evidence) -> Evidence:
        for name in ("samples", "batches", "prefill", "trainer", "trainer_tempered"):
            getattr(self, name).extend(getattr(other, name))
        for name, log_probs in other.packed.items():
            self.packed.setdefault(name, []).extend(log_probs)
        return self


@dataclass(frozen=True)
class Link:
    """A link counts the log-probs of two computations that are equal by bytes, and names the first that is not.

    Attributes:
        first: the first mismatch in words, at [sequence, token]; None where all log-probs are equal.
        furthest: the greatest absolute difference; None where the log-probs cannot be compared, one by one.
    """

    name: str
    equal: int
    total: int
    first: str | None
    furthest: float | None

    @property
    def holds(self) -> bool:
        return self.total > 0 and self.equal == self.total

    @property
    def comparable(self) -> bool:
        """Whether both computations gave a number for each token, so that a broken link tells of other numbers."""
        return self.total > 0 and self.furthest is not None


def links(evidence: Evidence) -> list[Link]:
    """Compare the evidence link by link, and add the conclusion that follows from the three links."""
    at_one = [index for index, sample in enumerate(evidence.samples) if sample.request.temperature == 1]
    return [
        *(link(f"trainer: alone == {name}", evidence.trainer, packed) for name, packed in evidence.packed.items()),
        link("engine prefill == trainer", evidence.prefill, evidence.trainer),
        link(
            "engine decode == engine prefill, where temperature is 1",
            [evidence.decode[index] for index in at_one],
            [evidence.prefill[index] for index in at_one],
        ),
        conclusion(evidence),
    ]


def conclusion(evidence: Evidence, name: str = "hence engine decode == trainer, at every temperature") -> Link:
    """Compare the log-probs that the engine sampled with and the log-probs that the trainer computes."""
    return link(name, evidence.decode, evidence.trainer_tempered)


def link(name: str, left: Sequence[Float[Tensor, "_"]], right: Sequence[Float[Tensor, "_"]]) -> Link:
    """Compare the log-probs of two computations.

    Another dtype, other lengths, or one NaN on either side: then no log-prob of the link counts as equal.
    """
    a, b = torch.cat(list(left)), torch.cat(list(right))
    mismatch, total = first_mismatch(a, b, boundaries(left)), max(len(a), len(b))
    if mismatch and mismatch.kind != "bytes":
        return Link(name, 0, total, str(mismatch), None)
    if not torch.equal(boundaries(left), boundaries(right)):
        return Link(name, 0, total, "sequences of other lengths", None)
    if (missing := a.isnan() | b.isnan()).any():
        where = coordinate(int(missing.int().argmax()), missing.shape, boundaries(left))
        return Link(name, 0, total, f"NaN at {list(where)}", None)
    apart = torch.where(a == b, 0, (a - b).abs())
    return Link(
        name=name,
        equal=len(a) - (mismatch.count if mismatch else 0),
        total=len(a),
        first=str(mismatch) if mismatch else None,
        furthest=apart.max().item() if total else None,
    )


def boundaries(sequences: Iterable[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0)
