"""Room `large`: the TIS hook on up to 4,096 sequences and a million tokens, against the oracle; none is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from batches import MASK_TYPES, Batch
from hypothesis import strategies as st

from lab.break_it import weights
from lab.break_it.weights import ABSENT

SEQUENCES = (0, 1, 2, 17, 256, 4096)
POWERS = [*[13] * 19, 20]  # the most tokens of a case, as a power of two: one in twenty may have a million
FEW = [8]  # the oracle's time grows with the square of a sequence's segments
DRIFTS = (0.0, 2**-9, 0.05, 0.5)  # of a log ratio, from equal policies to broken ones
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Case:
    """One call of the TIS hook, whose batch is made when it is needed: its print says all of it."""

    config: dict[str, Any]
    carrier: str
    seed: int
    sequences: int
    tokens: int
    drift: float
    absent: float
    masked: float
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config, carrier = draw(weights.configured())
    seed = draw(st.integers(0, 2**32))
    dice = random.Random(seed)  # hypothesis would draw the most tokens much oftener
    powers = FEW if "segment" in str(config) else POWERS
    return Case(
        config=config,
        carrier=carrier,
        seed=seed,
        sequences=draw(st.sampled_from(SEQUENCES)),
        tokens=int(2 ** dice.uniform(0, dice.choice(powers))),
        drift=draw(st.sampled_from(DRIFTS)),
        absent=draw(st.sampled_from([0.0, 0.0, 1e-3])),
        masked=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        dtypes=(draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(MASK_TYPES))),
    )


def batch_of(case: Case) -> Batch:
    """Ragged responses, some of which are empty; absent log-probs lie under the mask and above it."""
    dice = torch.Generator().manual_seed(case.seed)
    lengths = _lengths(case, dice)
    count = sum(lengths)
    behavior = torch.rand(count, generator=dice).clamp(min=1e-4).log()
    proximal = behavior + case.drift * torch.randn(count, generator=dice)
    for side in (proximal, behavior):
        gone = torch.rand(count, generator=dice) < case.absent
        side[gone] = torch.tensor(ABSENT)[torch.randint(len(ABSENT), (int(gone.sum()),), generator=dice)]
    mask = torch.rand(count, generator=dice) >= case.masked
    rows = [list(x.to(dtype).split(lengths)) for x, dtype in zip((proximal, behavior, mask), case.dtypes, strict=True)]
    return Batch(rows[0], rows[1], rows[2], [3] * len(lengths))


def _lengths(case: Case, dice: torch.Generator) -> list[int]:
    if not case.sequences:
        return []
    share = torch.randn(case.sequences, generator=dice).mul(1.5).exp()
    drawn = torch.multinomial(share, case.tokens, replacement=True, generator=dice)
    return drawn.bincount(minlength=case.sequences).tolist()


def judge(case: Case) -> str:
    """`right`, or `unclear` where rounding decides; an AssertionError where a weight or mask is not the oracle's."""
    return weights.judge(weights.Case(case.config, case.carrier, batch_of(case)))
