"""The record of a need: something of a host that a hook of ours calls, replaces, or reads in a frame."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mis_plugins.errors import MisError
from mis_plugins.hosts.frames import held_by

LOSS_HOOKS = ("compute_mis_weights_with_cp", "policy_loss")
CARRY, CONVERT, GENERATE = ("carry_versions",), ("convert_with_versions",), ("generate_with_versions",)
TIS = (  # the arguments of the TIS hook that every host hands over
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
)
ROLLOUT_HOOKS = ("normalize_rollout", "count_samples")
VERSION_HOOKS = ("generate_with_versions", "convert_with_versions", "carry_versions")
ROUTES = ("watch_routes",)
BITWISE_LOSS, BITWISE_INIT = "true_on_policy.hosts.policy_loss", "true_on_policy.hosts.miles_init"
HOOKS = (
    *LOSS_HOOKS,
    *ROLLOUT_HOOKS,
    "report_step",
    "drop_broken_samples",
    "kept_token_mean",
    *ROUTES,
    *VERSION_HOOKS,
    BITWISE_LOSS,
    BITWISE_INIT,
)
"""Hooks by name: those of `mis_plugins.mis` by their last part, others by their dotted path."""


class NeedError(MisError):
    """No address answers a need: this version of the host has moved what a hook calls."""


class Address(NamedTuple):
    """One place in a host: a module, and a name in it, or a class and its member.

    >>> Address.of("miles.utils.types:Sample.tokens")
    Address(module='miles.utils.types', names=('Sample', 'tokens'))
    """

    module: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Address:
        module, _, names = text.partition(":")
        return cls(module, tuple(names.split(".")))

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.names)}"


@dataclass(frozen=True)
class Need:
    """One need of our hooks.

    host: the host's title in sentences.
    what: the need in words.
    hooks: our hooks that fail without it, of `HOOKS`.
    at: addresses `module:name` or `module:Class.member`, the newest first.
    parameters: names of the parameters that a hook gives, or binds, by keyword.
    holds: local variables that a hook reads in the function's frame.
    hands: keywords that the function hands on to a hook of ours.
    ran: the place in `at` of the address that our own runs used.
    """

    host: str
    what: str
    hooks: tuple[str, ...]
    at: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    hands: tuple[str, ...] = ()
    ran: int = -1

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(map(Address.of, self.at))

    @property
    def is_loaded(self) -> bool:
        """Whether this process has loaded a module of one of the addresses."""
        return any(address.module in sys.modules for address in self.addresses)

    def get(self) -> Any:
        """Import what the need names, from the newest address that has it.

        Raises:
            NeedError: no address has it.
        """
        owner, name = self.owner()
        return getattr(owner, name)

    def owner(self) -> tuple[Any, str]:
        """The module or class that holds what the need names, and its name there, so that it can be replaced.

        Raises:
            NeedError: no address has it.
        """
        for address in self.addresses:
            found = _owner(_imported(address.module), address)
            if found is not None:
                return found
        raise self.error()

    def loaded(self) -> Any | None:
        """What the need names, where this process runs the host; None where the host's package is not loaded.

        Raises:
            NeedError: the host's package is loaded, and no address has it.
        """
        for address in self.addresses:
            found = _owner(sys.modules.get(address.module), address)
            if found is not None:
                return getattr(*found)
        package = self.addresses[0].module.partition(".")[0]
        return self.get() if package in sys.modules else None

    def of(self, instance: Any) -> Any:
        """The member of an instance of the host by the newest name that it has.

        Raises:
            NeedError: the instance has no member of these names.
        """
        return getattr(instance, self.name_on(instance))

    def name_on(self, owner: Any) -> str:
        """The newest name under which `owner` holds what the need names.

        Raises:
            NeedError: it holds none.
        """
        for name in dict.fromkeys(address.names[-1] for address in self.addresses):
            if hasattr(owner, name):
                return name
        raise self.error()

    def frame(self) -> Mapping[str, Any]:
        """Local variables of the function further up the call stack; empty where the stack lacks it."""
        return held_by(*((address.module, address.names[-1]) for address in self.addresses))

    def error(self) -> NeedError:
        still = ", ".join(hook for hook in HOOKS if hook not in self.hooks)
        return NeedError(
            f"{self.host} has moved or dropped {self.what}, which {', '.join(self.hooks)} needs; looked at "
            f"{', '.join(self.at)}. Take a version of mis-plugins that names this version of {self.host}, or leave "
            f"the hook out. Hooks that work without it: {still}"
        )


def more_of(function: Any, *sources: Any) -> dict[str, Any]:
    """Keyword-only parameters of a host's function, taken by name from the first source that has each of them.

    A host hands some settings through its own generation by parameters that came after the call was read.
    """
    named = (
        name
        for name, one in inspect.signature(function).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    )
    return {
        name: getattr(source, name) for name in named for source in reversed(sources) if hasattr(source, name)
    }


def _imported(module: str) -> Any | None:
    """A module; None where it, or a package above it, does not exist. An error inside it is the host's own."""
    if module in sys.modules:
        return sys.modules[module]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise


def _owner(module: Any | None, address: Address) -> tuple[Any, str] | None:
    owner = module
    for name in address.names[:-1]:
        owner = getattr(owner, name, None)
    last = address.names[-1]
    return (owner, last) if owner is not None and hasattr(owner, last) else None
