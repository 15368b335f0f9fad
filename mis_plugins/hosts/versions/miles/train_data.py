"""Put versions from samples into Miles's train data, under the one key of its list that can carry them.

Miles lists the keys that it packs for the trainer (`ray/rollout/train_data_conversion.py:352` of 31f1ca9). No
code behind the packing reads `weight_versions`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Any

from mis_plugins.errors import ConfigError
from mis_plugins.hosts.needs.miles import NEEDS
from mis_plugins.hosts.versions.rollouts import NUMBERING
from mis_plugins.hosts.versions.settings import recomputes, segment_wise


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The host's own train data, with a `Note` of each sample as its `weight_versions`.

    Raises:
        ConfigError: an argument whose conversion needs inputs that Miles does not hand to this function.
        InputError: a sample without versions, or with others than its tokens, or with images where recompute scores.
    """
    for name in ("use_dynamic_global_batch_size", "multi_lora"):
        if getattr(args, name, False):
            raise ConfigError(
                f"--{name.replace('_', '-')}: Miles hands what it needs to its own conversion alone, so versions "
                "cannot be carried; leave it out, or --custom-convert-samples-to-train-data-path"
            )
    notes = NUMBERING.noted(samples, scored=recomputes(segment_wise(args)))
    path = args.custom_reward_post_process_path
    rewards = None if path is None else pkgutil.resolve_name(path)
    data = NEEDS.conversion.get()(args, samples, {}, None, rewards)
    return data | {"weight_versions": notes}
