"""The chain from the trainer's log-probs to the engine's sampling log-probs, link by link, and the certificate of it.

(1) trainer: a sequence alone == in any batch; (2) engine prefill == trainer; (3) engine decode == engine prefill. The
engine's prefill knows no temperature, so (3) covers temperature 1 alone. The conclusion, engine decode == trainer, is
therefore compared at every temperature as well. The certificate says what ran, where, and how many log-probs were
equal.
"""

import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from mis_plugins.shared.files import write_text
from mis_plugins.shared.provenance import cpu_name
from true_on_policy.bitwise import coordinate, first_mismatch
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import NormOrder
from true_on_policy.diff.log_prob_record import absent, digest, provenance
from true_on_policy.engines.protocol import Sample
from true_on_policy.kernels.native import NAME

Verdict = Literal["equal", "different", "vacuous", "incomplete"]
LogProbs = list[Float32[Tensor, "_"]]  # one tensor a sequence


@dataclass
class Evidence:
    """The evidence of a verification: log-probs of one set of sampled tokens, by who computed them and how.

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

    def __iadd__(self, other: "Evidence") -> "Evidence":
        for name in ("samples", "batches", "prefill", "trainer", "trainer_tempered"):
            getattr(self, name).extend(getattr(other, name))
        for name, log_probs in other.packed.items():
            self.packed.setdefault(name, []).extend(log_probs)
        return self


@dataclass(frozen=True)
class Link:
    """A link counts the log-probs of two computations that are equal by bytes, and names the first that is not.

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
    """Compare the log-probs of two computations; none is equal where a dtype or a length differs, or one is absent."""
    a, b = torch.cat(list(left)), torch.cat(list(right))
    mismatch, total = first_mismatch(a, b, boundaries(left)), max(len(a), len(b))
    if mismatch and mismatch.kind != "bytes":
        return Link(name, 0, total, str(mismatch), None)
    if not torch.equal(boundaries(left), boundaries(right)):
        return Link(name, 0, total, "sequences of other lengths", None)
    if (missing := absent(a) | absent(b)).any():
        where = coordinate(int(missing.int().argmax()), missing.shape, boundaries(left))
        return Link(name, 0, total, f"no log-prob at {list(where)}", None)
    return Link(
        name=name,
        equal=len(a) - (mismatch.count if mismatch else 0),
        total=len(a),
        first=str(mismatch) if mismatch else None,
        furthest=(a - b).abs().max().item() if total else None,
    )


def boundaries(sequences: Iterable[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0)


@dataclass(frozen=True)
class Certificate:
    """A certificate states the result of one verification.

    links: the links of the chain; each must hold.
    control: the conclusion of the chain with the stock kernels and orders of both sides; it must not hold.
    situations: how often each situation occurred while the engine sampled.
    met: the names of the situations that were met.
    not_met: the situations that could have been met and were not, each with how to meet it.
    not_of_engine: the situations that this engine cannot meet, or does not report.
    weights: SHA-256 of the model's first weights.
    prompts: name, SHA-256 and number of the real prompts; None where the prompts are random tokens.
    hashes: SHA-256 of the log-probs of all tokens, by who computed them.
    engine: the name of the engine, and the versions of the packages in the engine's own environment.
    commit: the commit of this project when the verification began.
    """

    engine: Mapping[str, str]
    trainer: str
    model: str
    weights: str
    prompts: Mapping[str, Any] | None
    contract: Contract
    order: NormOrder
    links: Sequence[Link]
    control: Link
    situations: Mapping[str, Any]
    met: Sequence[str]
    not_met: Mapping[str, str]
    not_of_engine: Sequence[str]
    hashes: Mapping[str, str]
    commit: str
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The verdict of the links, the control and the situations together.

        `different`: a link tells of other numbers. `vacuous`: the stock kernels agree too. `incomplete`: a situation
        was not met, or the log-probs of a link or of the control cannot be compared.
        """
        if any(link.comparable and not link.holds for link in self.links):
            return "different"
        if self.control.holds:
            return "vacuous"
        compared = all(link.comparable for link in (*self.links, self.control))
        return "equal" if compared and not self.not_met else "incomplete"

    def write(self, path: Path) -> None:
        """Write the certificate as JSON, whole or not at all."""
        document = {
            "verdict": self.verdict,
            **asdict(self),
            "contract": {"backend": NAME, **asdict(self.contract)},
            "machine": {
                "cpu": cpu_name(),
                "platform": f"{platform.system()} {platform.machine()}",
                **json.loads(provenance()["environment"]),
            },
            "command": f"python -m true_on_policy {' '.join(sys.argv[1:])}",
        }
        write_text(path, json.dumps(document, indent=2) + "\n")

    def __str__(self) -> str:
        rows = [*self.links, self.control]
        width, lines = max(len(link.name) for link in rows), []
        for link in rows:
            apart = "" if link.holds or link.furthest is None else f", at most {link.furthest:.2g} apart"
            lines.append(f"{link.name:{width}}  {link.equal} of {link.total} equal{apart}")
        lines += [f"{link.name}: {link.first}" for link in self.links if not link.holds]
        lines.append(f"met: {', '.join(self.met)}")
        if self.not_of_engine:
            lines.append(f"not of this engine: {', '.join(self.not_of_engine)}")
        lines += [f"not met: {name}: {remedy}" for name, remedy in self.not_met.items()]
        return "\n".join([*lines, f"verdict: {self.verdict}"])


def hashes(evidence: Evidence) -> dict[str, str]:
    named: dict[str, LogProbs] = {
        "engine decode": evidence.decode,
        "trainer, every temperature": evidence.trainer_tempered,
        "engine prefill": evidence.prefill,
        "trainer": evidence.trainer,
    }
    return {name: digest(torch.cat(log_probs)) for name, log_probs in named.items()}
