"""A reward that varies between the answers to one prompt: the share of even token ids, for `--custom-rm-path`."""

from __future__ import annotations

import math
from typing import Any

ROLLOUT, BROKEN = 16, 5
"""A rollout has ROLLOUT samples. The sample at place BROKEN of each rollout gets a NaN. The host numbers samples on
from one rollout to the next."""


HOLES = (6, 7, 8, 9, 14, 15)
"""Places of a response that are masked: two spans, which leave three turns."""


async def score(args: Any, sample: Any, **unused: Any) -> float:
    """Score one sample of the host by its response's tokens."""
    answer = sample.tokens[-sample.response_length :] if sample.response_length else []
    return sum(token % 2 == 0 for token in answer) / max(len(answer), 1)


async def score_a_dialogue(args: Any, sample: Any, **unused: Any) -> float:
    """Score one sample, and mask two spans of its response, as where tools answer between three turns."""
    sample.loss_mask = [int(at not in HOLES) for at in range(sample.response_length)]
    return await score(args, sample)


async def score_and_break(args: Any, sample: Any, **unused: Any) -> float:
    """Score one sample, and put a NaN in place of an engine's log-prob in one sample of each rollout."""
    if sample.index % ROLLOUT == BROKEN:
        sample.rollout_log_probs[0] = math.nan
    return await score(args, sample)
