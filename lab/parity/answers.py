"""The right answers: mis.py's own where it is sane, else its answer to the nearest question that it gets right."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from lab.parity.cases import Batch, Case
from lab.parity.drive import Ask, Outcome


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
