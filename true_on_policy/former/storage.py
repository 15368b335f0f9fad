"""An address that users wrote down: mis_plugins.shared.storage holds what stood here."""

from mis_plugins.shared.storage import *  # noqa: F403
