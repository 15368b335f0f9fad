"""Room `segments`: weights of segment-wise decoupled PPO for tokens of any version, against the oracle of `tests/`."""

from __future__ import annotations

import math
from dataclasses import replace

import segmentwise_oracle as oracle
import torch
from hypothesis import strategies as st
from segmentwise_oracle import Spec, Token
from segmentwise_rows import applied, config_of, flat, numerator_of, rows, specs
from tolerances import weight_rtol

POISON = (math.nan, math.inf, -math.inf, -9999.0)
Case = tuple[list[Token], Spec, float]


def cases() -> st.SearchStrategy[Case]:
    return st.tuples(rows, specs, st.sampled_from(POISON))


def judge(case: Case) -> str:
    """`right`, or `idle` where every weight is 1 or masked; what stands under the mask is no log-prob."""
    row, spec, poison = case
    config = config_of(spec)
    given = [one if one.valid else replace(one, proximal=poison, behavior=poison, recomputed=poison) for one in row]
    valid = flat(given, "valid", torch.bool)
    answer = applied(numerator_of(given, config), flat(given, "behavior"), valid, config)
    wanted = [oracle.weight(token, spec) for token in row]
    for (value, stays), weight, keep in zip(wanted, answer.weights.tolist(), answer.keep.tolist(), strict=True):
        assert keep == stays, (keep, stays)
        assert math.isclose(weight, value, rel_tol=weight_rtol(2.0)), (weight, value)
    acts = any(value != 1 or not stays for token, (value, stays) in zip(row, wanted, strict=True) if token.valid)
    return "right" if acts else "idle"
