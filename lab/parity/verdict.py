"""How far an answer is from the right answer, and which deviations are faults.

The right answer is mis.py's own where it is sane, else its answer to the nearest question that it gets right.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lab.parity.cases import Batch, Case
from lab.parity.drive import Ask, Outcome

# Tolerances relative to the largest gradient, and to max(1, |value|). A metric may be exp(2 * 20): a float32 sum of 20
# carries a rounding of about 2e-6, which the exponential turns into a relative error.
GRADIENT_TOLERANCE = 3e-6
METRIC_TOLERANCE = 2e-5


@dataclass
class Difference:
    """The worst deviations over any number of questions; no tolerance excuses `faults`."""

    questions: int = 0
    loss: float = 0.0
    gradient: float = 0.0
    metric: float = 0.0
    metric_name: str = ""
    mask_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)
    theirs: set[str] = field(default_factory=set)

    @property
    def equal(self) -> bool:
        within = max(self.loss, self.gradient) <= GRADIENT_TOLERANCE and self.metric <= METRIC_TOLERANCE
        return within and not self.mask_tokens and not self.faults

    def asked_about(self, what: str) -> Difference:
        """Note a question as the example of each fault, or of a deviation beyond tolerance."""
        wrong = list(self.faults) or ([] if self.equal else ["deviates"])
        self.example = {fault: what for fault in wrong}
        return self

    def worse_of(self, other: Difference) -> None:
        self.questions += other.questions
        self.loss, self.gradient = max(self.loss, other.loss), max(self.gradient, other.gradient)
        if other.metric > self.metric:
            self.metric, self.metric_name = other.metric, other.metric_name
        self.mask_tokens += other.mask_tokens
        self.faults += other.faults
        self.example = other.example | self.example
        self.theirs |= other.theirs


def difference(ours: Outcome, right: Outcome, valid: Tensor, skip: tuple[str, ...] = ()) -> Difference:
    """Compare our answer with the right answer; metrics whose names begin with one of `skip` are left out."""
    found = Difference(questions=1)
    if ours.error or right.error:
        found.faults.update([f"ours raised {ours.error}" if ours.error else f"the reference raised {right.error}"])
        return found
    found.loss = abs(ours.loss - right.loss) / max(1.0, abs(right.loss))
    found.gradient = _relative(ours.gradient, right.gradient)
    if len(right.masks):
        found.mask_tokens = int((ours.masks.bool() != right.masks.bool()).sum())
    names = [name for name in right.reported if not name.startswith(skip)]
    found.faults.update(f"no metric {name}" for name in names if name not in ours.reported)
    for name in (name for name in names if name in ours.reported):
        _compare_metric(found, name, ours, right, valid)
    found.faults.update(f"{key} is not finite" for key, value in ours.tokenwise.items() if not value.isfinite().all())
    found.loss, found.gradient = _nan_is_inf(found.loss), _nan_is_inf(found.gradient)
    return found


def _compare_metric(found: Difference, name: str, ours: Outcome, right: Outcome, valid: Tensor) -> None:
    apart = _far(torch.tensor(ours.reported[name]), torch.tensor(right.reported[name]))
    if name in ours.tokenwise and name in right.tokenwise:
        apart = max(apart, _far(ours.tokenwise[name][valid], right.tokenwise[name][valid]))
    if apart > found.metric:
        found.metric, found.metric_name = apart, name


def _far(a: Tensor, b: Tensor) -> float:
    return _nan_is_inf(((a - b).abs() / b.abs().clamp_min(1.0)).max().item()) if a.numel() else 0.0


def _relative(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest entry of `b`, or to 1 where `b` is 0."""
    largest = b.abs().max().item()
    return (a - b).abs().max().item() / (largest if largest > 0 else 1.0)


def _nan_is_inf(x: float) -> float:
    return math.inf if math.isnan(x) else x


def what_theirs_gave(theirs: Outcome, right: Outcome) -> str:
    if theirs.error:
        return "raises " + theirs.error.partition(":")[0]
    if not theirs.finite:
        return "non-finite loss or gradient"
    if not all(value.isfinite().all() for value in theirs.tokenwise.values()):
        return "non-finite metrics"
    apart = _relative(theirs.gradient, right.gradient)
    return "right" if apart <= GRADIENT_TOLERANCE else f"gradient off by {magnitude(apart)}"


def magnitude(x: float) -> str:
    return f"1e{math.floor(math.log10(x))}"


def defect(case: Case, batch: Batch) -> str:
    """Name the documented defect of mis.py that a question meets; empty where it meets none."""
    if case.normalize and case.level == "geometric":
        return "geometric level with normalization"
    if case.normalize and case.mode == "mask":
        return "mask mode with normalization"
    if case.normalize and case.level == "sequence" and batch.has_dead_sequence:
        return "normalization with a fully masked sequence"
    if case.veto and case.rejection is None:
        return "veto without use_rs"
    return ""


def needs_scaling_by_hand(case: Case, batch: Batch) -> bool:
    """Whether mis.py's own mean weight is wrong or missing, so that the answer is scaled by hand."""
    dead = case.level == "sequence" and batch.has_dead_sequence
    return case.normalize and (case.mode == "mask" or case.level == "geometric" or dead)


def right_answer(ask: Ask, theirs: str, case: Case, batch: Batch) -> Outcome:
    """Ask mis.py the nearest case that it gets right, and apply by hand the normalization that it gets wrong."""
    by_hand = needs_scaling_by_hand(case, batch)
    sane = replace(case, normalize=case.normalize and not by_hand)
    outcome = _ask_with_veto(ask, theirs, sane, batch)
    return outcome.divided_by(_mean_weight(ask, theirs, case, batch)) if by_hand else outcome


def _ask_with_veto(ask: Ask, theirs: str, case: Case, batch: Batch) -> Outcome:
    """Ask mis.py; a veto alone becomes a rejection whose bounds let every ratio pass."""
    if not case.veto or case.rejection is not None:
        return ask(case, batch, theirs)
    return ask(_VetoAlone(**asdict(case)), batch, theirs)


class _VetoAlone(Case):
    def flat_keys(self) -> dict[str, Any]:
        return super().flat_keys() | {"use_rs": True, "rs_lower_bound": 0.0, "rs_upper_bound": 1e30}


def _mean_weight(ask: Ask, theirs: str, case: Case, batch: Batch) -> float:
    """Average the weights over valid tokens that the mask mode itself keeps, or over sequences with such a token."""
    bounded = ask(replace(case, rejection=None, veto=False, normalize=False), batch, theirs)
    weights = bounded.weights.double().split(batch.response_lengths)
    kept = bounded.masks.bool().split(batch.response_lengths)
    if case.level == "token":
        counted = torch.cat([w[k] for w, k in zip(weights, kept, strict=True)])
    else:
        counted = torch.stack([w[k][0] for w, k in zip(weights, kept, strict=True) if k.any()] or [torch.tensor(1.0)])
    mean = counted.mean().item() if len(counted) else 1.0
    return mean if mean > 1e-8 else 1.0
