"""Room `large`: the TIS hook on up to 4,096 sequences and a million tokens, which are copies of a few.

A weight or a mask of a sequence reads other sequences through a mean at most, and the mean over copies is the mean over
the few. So the oracle judges the few, and every copy must have their weights and masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import oracle
import torch
from batches import MASK_TYPES, Batch
from drive import Outcome, assert_matches_oracle, one_rank, spread
from hypothesis import strategies as st
from tolerances import DECISION, EPS, normalized_rtol

from lab.break_it import weights
from lab.break_it.weights import ABSENT, CARRIERS, SPELLED
from mis_plugins import mis

LENGTHS = (0, 1, 5, 40, 256)
COPIES = (0, 1, 3, 64, 1024)
DRIFTS = (0.0, 2**-9, 0.05, 0.5)  # of a log ratio, from equal policies to broken ones
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Case:
    """One call of the TIS hook, whose log-probs and masks follow from the seed."""

    config: dict[str, Any]
    carrier: str
    seed: int
    lengths: list[int]
    copies: int
    drift: float
    absent: float
    masked: float
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config, carrier = draw(weights.configured())
    config.pop("m2_threshold", None)  # M2PO orders the tokens of a batch, where copies are ties
    return Case(
        config=config,
        carrier=carrier,
        seed=draw(st.integers(0, 2**32)),
        lengths=draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4)),
        copies=draw(st.sampled_from(COPIES)),
        drift=draw(st.sampled_from(DRIFTS)),
        absent=draw(st.sampled_from([0.0, 0.0, 0.01])),
        masked=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        dtypes=(draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(MASK_TYPES))),
    )


def few(case: Case) -> Batch:
    """The sequences that are copied; absent log-probs lie under the mask and above it."""
    dice, count = torch.Generator().manual_seed(case.seed), sum(case.lengths)
    behavior = torch.rand(count, generator=dice).clamp(min=1e-4).log()
    proximal = behavior + case.drift * torch.randn(count, generator=dice)
    for side in (proximal, behavior):
        gone = torch.rand(count, generator=dice) < case.absent
        side[gone] = torch.tensor(ABSENT)[torch.randint(len(ABSENT), (int(gone.sum()),), generator=dice)]
    mask = torch.rand(count, generator=dice) >= case.masked
    rows = [
        list(x.to(dtype).split(case.lengths)) for x, dtype in zip((proximal, behavior, mask), case.dtypes, strict=True)
    ]
    return Batch(rows[0], rows[1], rows[2], [3] * len(case.lengths))


def judge(case: Case) -> str:
    """`right`, or `unclear` where rounding decides; an AssertionError where a copy is not what the oracle says."""
    batch = few(case)
    whole = replace(batch, **{name: rows * case.copies for name, rows in vars(batch).items()})
    kwargs = whole.hook_kwargs()
    args = CARRIERS[case.carrier](SPELLED | {"mis": case.config})
    loss, masks, _ = mis.compute_mis_weights_with_cp(args, **kwargs, parallel_state=one_rank())
    assert case.copies, "a batch without a sequence is answered"
    expected = oracle.correct(batch.samples, case.config)
    largest = max(map(spread, batch.samples))
    if expected.margin <= DECISION + EPS * largest:
        return "unclear"
    applied = torch.autograd.grad(loss.sum(), kwargs["pg_loss"])[0].view(case.copies, sum(case.lengths))
    first = list(applied[0].split(case.lengths))
    assert_matches_oracle(Outcome(loss, first, list(masks[: len(case.lengths)]), {}), batch, expected, full=False)
    torch.testing.assert_close(applied, applied[:1].expand_as(applied), rtol=normalized_rtol(largest), atol=0)
    kept = torch.cat(list(masks)).view_as(applied)
    assert torch.equal(kept, kept[:1].expand_as(kept)), "copies of a sequence have other masks"
    return "right"
