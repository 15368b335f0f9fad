"""An address that users wrote down: mis_plugins.versions.recompute holds what stood here."""

from mis_plugins.versions.recompute import *  # noqa: F403
