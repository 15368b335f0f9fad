"""Put versions from samples into Miles's train data, under the one key of its list that can carry them.

Miles lists the keys that it packs for the trainer (`ray/rollout/train_data_conversion.py:352` of 31f1ca9). No
code behind the packing reads `weight_versions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.versions.miles.shelf import NUMBERING
from mis_plugins.hosts.versions.settings import recomputes, segment_wise


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The host's own train data, with a `Note` of each sample as its `weight_versions`.

    Raises:
        ConfigError: an argument whose conversion needs inputs that Miles does not hand to this function.
        InputError: a sample without versions, or with others than its tokens, or with images where recompute scores.
    """
    from miles.ray.rollout import train_data_conversion as host  # type: ignore[import-not-found]
    from miles.utils.misc import load_function  # type: ignore[import-not-found]

    for name in ("use_dynamic_global_batch_size", "multi_lora"):
        if getattr(args, name, False):
            raise ConfigError(
                f"--{name.replace('_', '-')}: Miles hands what it needs to its own conversion alone, so versions "
                "cannot be carried; leave it out, or --custom-convert-samples-to-train-data-path"
            )
    notes = NUMBERING.noted(samples, scored=recomputes(segment_wise(args)))
    rewards = load_function(args.custom_reward_post_process_path)
    data = host.convert_samples_to_train_data(args, samples, {}, None, rewards)
    return data | {"weight_versions": notes}
