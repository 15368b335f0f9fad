"""The class with which our hooks claim the keys of a config file, where a host's parser demands an owner of each.

A newer Miles reads the attribute `config_class` of each function of its arguments, and refuses a key that neither the
parser nor such a class has. Its commits are named in `hosts/records/newer.txt`.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from mis_plugins.config import reading
from mis_plugins.errors import ConfigError

R = TypeVar("R")
BASE = ("miles.utils.args.schema", "BaseConfig")  # what a `config_class` must inherit
NAME = "MisPluginsConfig"
KEYS = ("mis", "bitwise", *reading.FLAT_KEYS, *reading.AREAL_KEYS)  # `use_tis` and `tis_clip` are the host's own
OURS = ("mis_plugins.", "true_on_policy.")
NOTICE = (
    "keys: Miles 31f1ca9 and slime 624b824 make an argument of every key; a newer Miles asks who owns a key, and any "
    "hook of ours on its command line owns mis, bitwise and the flat keys"
)
FLAGS = {
    "compute_mis_weights_with_cp": "custom_tis_function_path",
    "compute_mis_weights_fsdp": "custom_tis_function_path",
    "policy_loss": "custom_loss_function_path",
    "report_step": "custom_megatron_before_train_step_hook_path",
    "watch_routes": "custom_megatron_before_log_prob_hook_path",
    "normalize_rollout": "rollout_data_postprocess_path",
    "count_samples": "rollout_data_postprocess_path",
    "drop_broken_samples": "rollout_sample_filter_path",
    "kept_token_mean": "custom_pg_loss_reducer_function_path",
    "generate_with_versions": "custom_generate_function_path",
    "convert_with_versions": "custom_convert_samples_to_train_data_path",
    "carry_versions": "custom_megatron_init_path",
    "miles_init": "custom_megatron_init_path",
    "prove_weights": "custom_megatron_init_path",
}
"""The argument that names each hook of this pack."""


class Hook(functools.partial[R]):
    """A function that a host loads by its dotted path, with the attribute that names the keys of ours.

    All hooks have one class: a parser that meets it a second time adds nothing, and hands its values to each.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        functools.update_wrapper(self, function)
        object.__setattr__(self, "__class__", Uncalled)

    def __reduce__(self) -> str:  # type: ignore[override]
        return self.func.__qualname__  # pickled by its dotted path, as a function is

    @property
    def config_class(self) -> type | None:
        """The class of our keys; None where no parser is loaded that would ask."""
        base = getattr(sys.modules.get(BASE[0]), BASE[1], None)
        return None if base is None else _inheriting(base)


class Uncalled(Hook[R]):
    """A hook before its first call, which raises where a hook is named under another hook's flag.

    Later calls look at no flag, and cost no more than a call of the function.
    """

    def __call__(self, *given: Any, **named: Any) -> R:
        if misplaced := under_another_flag(given[0] if given else named.get("args")):
            raise ConfigError(misplaced)
        object.__setattr__(self, "__class__", Hook)
        return self(*given, **named)


def under_another_flag(args: Any) -> str | None:
    """Say which hook the arguments name under another hook's flag; None where they name none."""
    for flag in dict.fromkeys(FLAGS.values()):
        value = args.get(flag) if isinstance(args, Mapping) else getattr(args, flag, None)
        path = getattr(value, "path", value)
        hook = path.rpartition(".")[2] if isinstance(path, str) and path.startswith(OURS) else ""
        if FLAGS.get(hook, flag) != flag:
            spelled, own = (f"--{name.replace('_', '-')}" for name in (flag, FLAGS[hook]))
            return f"{spelled} {path}: the host calls {hook} by {own} alone; give it there"
    return None


@functools.cache
def _inheriting(base: type) -> type:
    from pydantic import create_model  # a host with such a parser brings it

    fields: dict[str, Any] = dict.fromkeys(KEYS, (Any, None))
    return create_model(NAME, __base__=base, __module__=__name__, **fields)


def __getattr__(name: str) -> Any:
    """The class under its own name, with which a host pickles the values for its workers."""
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _inheriting(getattr(import_module(BASE[0]), BASE[1]))
