"""An address that users wrote down: mis_plugins.versions.staleness_bound holds what stood here."""

from mis_plugins.versions.staleness_bound import *  # noqa: F403
