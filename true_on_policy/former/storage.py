"""An old import path, kept for users' code: mis_plugins.shared.storage holds the code."""

from mis_plugins.shared.storage import *  # noqa: F403
