"""The key `bitwise:` of `--custom-config-path`, which both hosts copy from the file to their arguments."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mis_plugins.config.reading import convert
from mis_plugins.config.view import view
from mis_plugins.errors import ConfigError
from true_on_policy.errors import HostConfigError

OnDifference = Literal["warn", "raise"]
Proven = Literal["first", "every"]


@dataclass(frozen=True)
class BitwiseConfig:
    """The config of the watch over a run's log-probs, and of the functions that this package's hooks call.

    on_difference: an OnDifference; `raise` stops the run at the next step.
    folder: the folder for the first differing sample of each rank; None is `bitwise` in the folder of `--output`
        (embedded host) or of `--save` (Miles and slime).
    loss: dotted path of the policy loss that our loss calls; None is the host's own.
    step_hook: dotted path of the before-train-step hook that our hook calls first; None is no hook.
    weights: after which weight updates the engines' weights are compared with the trainer's, a Proven: the one
        before the first rollout, or every; None compares none, unless the hook `prove_weights` is given.
    """

    on_difference: OnDifference = "warn"
    folder: str | None = None
    loss: str | None = None
    step_hook: str | None = None
    weights: Proven | None = None

    @classmethod
    def from_args(cls, args: Any) -> "BitwiseConfig":
        """Read the key `bitwise:` of a host's arguments, or the defaults; a HostConfigError quotes what cannot work."""
        given = view(args).get("bitwise")
        try:
            return convert(cls, {} if given is None else given, "bitwise")
        except ConfigError as error:
            raise HostConfigError(str(error)) from None

    def place(self, args: Any) -> Path:
        """Return the folder for differing samples."""
        if self.folder:
            return Path(self.folder)
        given = view(args)
        return Path(given.get("output") or given.get("save") or ".") / "bitwise"

    def hook(self, name: Literal["loss", "step_hook"]) -> Callable[..., Any] | None:
        """Load the function that our hook calls; None where the key is not set.

        Raises:
            HostConfigError: the dotted path names no function that can be loaded.
        """
        path = getattr(self, name)
        if path is None:
            return None
        try:
            function = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise HostConfigError(
                f"bitwise.{name}: cannot load {path!r} ({error}); give package.module.function"
            ) from error
        if not callable(function) or path.startswith("true_on_policy."):
            raise HostConfigError(
                f"bitwise.{name}: {path!r} is no function, or is true_on_policy's own; name another package's function"
            )
        return function
