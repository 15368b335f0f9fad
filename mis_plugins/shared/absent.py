"""Which numbers stand for a log-prob that is not there: one record for the hooks, the sample filter, readers, engines.

    None              SGLang, before a token that it did not score
    -9999             vLLM's server, in place of all that is lower; SkyRL, where vLLM gave none
    -1e9, -1e4        fills of masked logits and of padding
    -3.4e38, -65504   SGLang, whose log of probability 0 is the dtype's lowest number
    1                 TRL's PPO, in padding

A log-prob of 0 is ordinary: the token was certain, or alone in the set it was sampled from. vime pads with 0 too, which
no number tells apart by itself: the report compares a run of zeros with what the trainer finds of those tokens.
"""

import math
from typing import Any

LOWEST = -746.0
"""A number at or below it is no log-prob of a sampled token: exp(-746) is 0 in float64, and what has probability 0 is
never sampled. One bound serves every dtype, as equality would not: -9999 is -9984 in bfloat16, -10000 in float16."""
HIGHEST = 0.5
"""A number above it is no log-prob: none is above 0, but for rounding, which in bfloat16 may reach a quarter. The
filter of samples, the report and `diff` ask. A hook does not: a test or a toy makes log mu + log r, often above 0."""


def is_absent(log_prob: Any) -> bool:
    """Whether an entry of a list is no log-prob: None, a text, a truth value, NaN, or out of bounds."""
    return not LOWEST < number_of(log_prob) <= HIGHEST


def number_of(entry: Any) -> float:
    """An entry of a list as a float; NaN where it is no number."""
    try:
        return math.nan if isinstance(entry, str | bytes | bool) else float(entry)
    except (TypeError, ValueError, OverflowError):
        return math.nan
