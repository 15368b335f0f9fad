"""Rows of tokens for hypothesis, written by any version, and the same as tensors."""

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from segmentwise_oracle import Spec, Token
from torch import Tensor

from mis_plugins.config.model import CorrectionConfig
from mis_plugins.correction.pipeline import correct
from mis_plugins.packing.layout import whole
from mis_plugins.packing.ragged import Ranks
from mis_plugins.versions.segment_wise import BehaviorWeight, SegmentWiseConfig, Written, proximal_t

CURRENT = 9
GRID = 2.0**-10  # log-probs on a grid: their differences are exact in float32
BOUNDS = (0.25, 2.0)
MARGIN = 4 * GRID  # how far, in log units, every ratio keeps from every bound


def on_grid(low: float, high: float) -> st.SearchStrategy[float]:
    return st.integers(round(low / GRID), round(high / GRID)).map(lambda n: n * GRID)


@st.composite
def tokens(draw: Callable, age: st.SearchStrategy[int]) -> Token:
    """Any version, the stored log-prob sometimes missing, tool and masked tokens among them."""
    behavior = draw(on_grid(-8, -0.5))
    moved = on_grid(-2, 2).filter(lambda x: all(abs(x - math.log(b)) > MARGIN for b in (*BOUNDS, 5.0, 0.2)))
    stored = draw(st.none() | moved)
    return Token(
        proximal=behavior + draw(moved),
        behavior=behavior,
        recomputed=None if stored is None else behavior + stored,
        version=draw(st.just(-1) | age.map(lambda a: CURRENT - a)),
        current=CURRENT,
        valid=draw(st.booleans()),
    )


ages = st.integers(-1, CURRENT)
rows = st.lists(tokens(ages), max_size=12)
specs = st.builds(
    Spec,
    cap=st.sampled_from([5.0, BOUNDS[1]]),
    floor=st.none(),
    mode=st.sampled_from(["truncate", "clip", "mask", "zero"]),
    method=st.just("recompute"),
    fresh=st.sampled_from(["proximal", "behavior", "behavior_at_age_0"]),
) | st.sampled_from([Spec(cap=None), Spec(BOUNDS[1], BOUNDS[0], "mask"), Spec(BOUNDS[1], 0.0, "zero")])


def config_of(spec: Spec, **settings: object) -> SegmentWiseConfig:
    named = {
        "weight_cap": spec.cap, "weight_floor": spec.floor, "mode": spec.mode, "method": spec.method,
        "fresh_tokens": spec.fresh,
    }  # fmt: skip
    return SegmentWiseConfig(**(named | settings))  # type: ignore[arg-type]


def flat(row: Sequence[Token], field: str, dtype: torch.dtype = torch.float32) -> Tensor:
    values = [getattr(token, field) for token in row]
    return torch.tensor([math.nan if value is None else value for value in values], dtype=dtype)


def written_of(row: Sequence[Token]) -> Written:
    return Written(flat(row, "version", torch.int64), flat(row, "recomputed"), CURRENT)


def numerator_of(row: Sequence[Token], config: SegmentWiseConfig) -> Tensor:
    return proximal_t(flat(row, "proximal"), flat(row, "behavior"), written_of(row), config)


def applied(numerator: Tensor, behavior: Tensor, valid: Tensor, config: SegmentWiseConfig) -> BehaviorWeight:
    """The bounded weights of one sequence, by the pipeline."""
    ragged = whole([valid.numel()]).place(valid, Ranks())
    found = correct(numerator, behavior, ragged, CorrectionConfig(config.weight, metrics="none"))
    return BehaviorWeight(found.weights, found.keep)
