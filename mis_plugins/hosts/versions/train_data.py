"""Versions from samples into Miles's train data. Of the keys that Miles hands to its trainer, one can carry them.

Miles lists what it packs for the trainer (`ray/rollout/train_data_conversion.py:352` of 31f1ca9). Of these keys
`weight_versions` is the one that no code reads behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mis_plugins.errors import ConfigError, InputError
from mis_plugins.hosts.versions.shelf import NUMBER, SHELF, VERSIONS, Note

GENERATE = "--custom-generate-function-path mis_plugins.mis.generate_with_versions"


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The host's own train data, with a `Note` of each sample as its `weight_versions`.

    Raises:
        ConfigError: the host would need what it does not hand to this function.
        InputError: a sample without versions, or with others than its tokens.
    """
    from miles.ray.rollout import train_data_conversion as host  # type: ignore[import-not-found]
    from miles.utils.misc import load_function  # type: ignore[import-not-found]

    for name in ("use_dynamic_global_batch_size", "multi_lora"):
        if getattr(args, name, False):
            raise ConfigError(
                f"--{name.replace('_', '-')}: Miles hands what it needs to its own conversion alone, so versions "
                "cannot be carried; leave it out, or --custom-convert-samples-to-train-data-path"
            )
    for sample in samples:
        _check(sample)
    rewards = load_function(args.custom_reward_post_process_path)
    data = host.convert_samples_to_train_data(args, samples, {}, None, rewards)
    numbers = [getattr(sample, NUMBER) for sample in samples]
    batch = SHELF.take(numbers)
    data["weight_versions"] = [
        Note(batch, number, getattr(sample, VERSIONS)).packed()
        for number, sample in zip(numbers, samples, strict=True)
    ]
    return data


def _check(sample: Any) -> None:
    versions = getattr(sample, VERSIONS, None)
    if versions is None or not hasattr(sample, NUMBER):
        raise InputError(f"sample {sample.index}: no {VERSIONS}; generate with {GENERATE}")
    if len(versions) != sample.response_length:
        raise InputError(
            f"sample {sample.index}: {VERSIONS} of {len(versions)} tokens, and the response has "
            f"{sample.response_length}; change responses before they are generated on, not after"
        )
