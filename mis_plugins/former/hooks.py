"""An address that users wrote down: mis_plugins.versions.update_hooks holds what stood here."""

from mis_plugins.versions.update_hooks import *  # noqa: F403
