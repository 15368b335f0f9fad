"""An old import path, kept for users' code: true_on_policy.diff.module_recorder holds the code."""

from true_on_policy.diff.module_recorder import *  # noqa: F403
