"""Put versions from samples into slime's train data, under the one key of its list that can carry them.

slime lists the keys that it packs for the trainer (`ray/rollout.py:786` of 624b824). The trainer reads
`source_names` only to leave it out of its averages (`observability/train_metric_utils.py:175`). The host's
own conversion is a method of the actor that calls this function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.needs.slime import SLIME
from mis_plugins.hosts.versions.rollouts import NUMBERING
from mis_plugins.hosts.versions.settings import recomputes, segment_wise

HOOK = "custom_convert_samples_to_train_data_func"


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The host's own train data, with a `Note` of each sample as its `source_names`.

    Raises:
        ConfigError: the caller is not slime's actor of the rollouts.
        InputError: a sample without versions, or with others than its tokens, or with images where recompute scores.
    """
    manager = SLIME.conversion.frame().get("self")
    if manager is None:
        raise ConfigError(
            "--custom-convert-samples-to-train-data-path mis_plugins.mis.convert_with_versions: not called by "
            "slime's RolloutManager; give it there, with slime 624b824"
        )
    notes = NUMBERING.noted(samples, scored=recomputes(segment_wise(args)))
    hook = getattr(manager, HOOK)
    setattr(manager, HOOK, None)  # so that the method converts by itself
    try:
        data = SLIME.conversion.of(manager)(samples)
    finally:
        setattr(manager, HOOK, hook)
    return data | {"source_names": notes}
