"""The certificate of a verification: what ran, where, and how many log-probs were equal."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mis_plugins.shared.files import write_text
from mis_plugins.shared.provenance import cpu_name
from true_on_policy.contract.cpu import Contract
from true_on_policy.contract.rounding import NormOrder
from true_on_policy.diff.log_prob_record import digest, provenance
from true_on_policy.verify.links import Evidence, Link, LogProbs

Verdict = Literal["equal", "different", "vacuous", "incomplete"]


@dataclass(frozen=True)
class Certificate:
    """A certificate states the result of one verification.

    Attributes:
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

        `different`: a link is broken. `vacuous`: the stock kernels agree too. `incomplete`: a situation was not met,
        or the log-probs of the control cannot be compared.
        """
        if not all(link.holds for link in self.links):
            return "different"
        if self.control.holds:
            return "vacuous"
        return "incomplete" if self.not_met or not self.control.comparable else "equal"

    def write(self, path: Path) -> None:
        """Write the certificate as JSON, whole or not at all."""
        write_text(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            **asdict(self),
            "machine": {
                "cpu": cpu_name(),
                "platform": f"{platform.system()} {platform.machine()}",
                **json.loads(provenance()["environment"]),
            },
            "command": f"python -m true_on_policy {' '.join(sys.argv[1:])}",
        }

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
