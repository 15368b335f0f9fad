"""The certificate of a verification: what ran, where, under which contract, and how many values were the same bytes."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from true_on_policy.contract import Contract
from true_on_policy.links import Evidence, Link, LogProbs
from true_on_policy.log_probs import digest, provenance
from true_on_policy.norm_order import NormOrder
from true_on_policy.storage import replaced

Verdict = Literal["equal", "different", "vacuous"]


@dataclass(frozen=True)
class Certificate:
    """A verification that came to an end.

    Attributes:
        links: the chain; each must hold.
        control: the same conclusion with the stock kernels and orders of both sides; it must not hold.
        situations: what occurred while the engine sampled, in numbers.
        hashes: SHA-256 of the log-probs of all tokens, by who computed them.
        engine: name and versions; its packages are those of its own environment.
        commit: of this project, as the verification began.
    """

    engine: Mapping[str, str]
    trainer: str
    model: str
    contract: Contract
    order: NormOrder
    links: Sequence[Link]
    control: Link
    situations: Mapping[str, Any]
    hashes: Mapping[str, str]
    commit: str
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """`different` if a link is broken; `vacuous` if nothing had to be done for the chain to hold."""
        if not all(link.holds for link in self.links):
            return "different"
        return "vacuous" if self.control.holds else "equal"

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        with replaced(path) as partial:
            partial.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            **asdict(self),
            "machine": {
                "cpu": _cpu_name(),
                "platform": f"{platform.system()} {platform.machine()}",
                **json.loads(provenance()["environment"]),
            },
            "command": f"python -m true_on_policy {' '.join(sys.argv[1:])}",
        }

    def __str__(self) -> str:
        rows = [*self.links, self.control]
        width = max(len(link.name) for link in rows)
        lines = [f"{link.name:{width}}  {link.equal} of {link.total} equal{_gap(link)}" for link in rows]
        broken = [f"{link.name}: {link.first}" for link in self.links if not link.holds]
        return "\n".join([*lines, *broken, f"verdict: {self.verdict}"])


def situations(evidence: Evidence, updates: int) -> dict[str, Any]:
    """What the workload really met, counted."""
    samples = evidence.samples
    return {
        "sampled_tokens": evidence.tokens,
        "sequences": len(samples),
        "longest_sequence": max(len(sample.sequence) for sample in samples),
        "temperatures": sorted({sample.request.temperature for sample in samples}),
        "weight_updates": updates,
        "prompt_tokens_from_cache": sum(sample.cached for sample in samples),
        "preemptions": sum(sample.preempted for sample in samples),
    }


def hashes(evidence: Evidence) -> dict[str, str]:
    named: dict[str, LogProbs] = {
        "engine decode": evidence.decode,
        "trainer, every temperature": evidence.trainer_tempered,
        "engine prefill": evidence.prefill,
        "trainer": evidence.trainer,
    }
    return {name: digest(torch.cat(log_probs)) for name, log_probs in named.items()}


def _gap(link: Link) -> str:
    return "" if link.holds else f", at most {link.furthest:.2g} apart"


def _cpu_name() -> str:
    """As Linux names it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
