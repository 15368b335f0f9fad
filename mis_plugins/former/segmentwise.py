"""An address that users wrote down: mis_plugins.versions.segment_wise holds what stood here."""

from mis_plugins.versions.segment_wise import *  # noqa: F403
