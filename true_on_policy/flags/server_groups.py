"""Read the groups of engines from Miles's --sglang-config, whose settings override the command line's."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from mis_plugins.config.file import parsed, text_of
from mis_plugins.config.view import view
from mis_plugins.errors import cut, shown

logger = logging.getLogger("true_on_policy")


def groups(args: Any) -> Iterator[tuple[str, argparse.Namespace]]:
    """Yield (place in the file, arguments) for each group of engines that samples from the trained model.

    The arguments are the host's, overridden by the group's settings.

    Miles v0.1.0 and main (31f1ca96) read the file in backends/sglang_utils/sglang_config.py. A file that this machine
    does not have cannot be read: a warning says so, and the check goes on.
    """
    path = getattr(args, "sglang_config", None)
    if path is None:
        return
    try:
        stated = parsed(text_of(path))
        found = [
            (f"{path}, model {shown(model['name'])}, group {number}", _arguments(args, model, group))
            for model in stated["sglang"]
            if model["name"] != "eval" and _is_trained(args, model)
            for number, group in enumerate(model.get("server_groups") or model.get("engine_groups") or ())
            if group["worker_type"] != "placeholder"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning(
            "sglang_config: %s cannot be read here (%s): the groups are not checked",
            path,
            cut(repr(error), 200),
        )
        return
    yield from found


def _is_trained(args: Any, model: Mapping[str, Any]) -> bool:
    """Whether a model gets the trainer's weights."""
    same, updated = model.get("model_path") in (None, args.hf_checkpoint), model.get("update_weights")
    return same if updated is None else updated


def _arguments(args: Any, model: Mapping[str, Any], group: Mapping[str, Any]) -> argparse.Namespace:
    own = group.get("overrides") or {}
    ranks = [own.get("tp_size"), group.get("num_gpus_per_engine"), model.get("num_gpus_per_engine")]
    stated = {f"sglang_{name}": value for name, value in own.items()}
    engine = next(filter(None, ranks), args.rollout_num_gpus_per_engine)
    return argparse.Namespace(**dict(view(args)) | stated | {"rollout_num_gpus_per_engine": engine})
