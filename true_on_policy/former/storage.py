"""An old import path, kept for users' code: files of mis_plugins.shared hold the code."""

from mis_plugins.shared.arrays import *  # noqa: F403
from mis_plugins.shared.budget import RecordError  # noqa: F401
from mis_plugins.shared.files import *  # noqa: F403
from mis_plugins.shared.foreign import *  # noqa: F403
