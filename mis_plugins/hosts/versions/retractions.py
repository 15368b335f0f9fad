"""Requests that the engine retracted: counted from its answers, told of each rollout, and logged by the trainer.

SGLang retracts a request to free its cache, or for an update of weights (`--pause-generation-mode retract`). It then
computes the tokens so far anew, and keeps their log-probs of the first pass. The routes of experts that it returns are
those of the second pass (miles#3277).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mis_plugins.errors import logger

RETRACTIONS = "output_retractions"  # the attribute of a sample: how often its requests were retracted
SHARE = "retracted_fraction"
ROUTES = (
    "; --use-rollout-routing-replay replays the routes of the last pass beside log-probs of the first: give the engine "
    "more cache or fewer requests at once, or pause by abort"
)


def hear(sample: Any, meta_info: Mapping[str, Any], before: int) -> None:
    """Add to the sample what the `meta_info` of an answer says, if its engine says anything.

    Args:
        before: how many tokens the response had before the answer; 0 begins to count anew.
    """
    retractions = meta_info.get("num_retractions")
    if retractions is not None:
        setattr(sample, RETRACTIONS, retractions + (getattr(sample, RETRACTIONS, 0) if before else 0))


def share(args: Any, samples: Sequence[Any]) -> dict[str, float]:
    """The share of the samples whose requests were retracted, by its name; empty where the engine does not say."""
    retractions = [getattr(sample, RETRACTIONS, None) for sample in samples]
    if None in retractions or not retractions:
        return {}
    retracted = sum(map(bool, retractions))
    if retracted:
        routes = ROUTES if getattr(args, "use_rollout_routing_replay", False) else ""
        logger.warning("the engine retracted the requests of %d of %d samples%s", retracted, len(retractions), routes)
    return {SHARE: retracted / len(retractions)}
