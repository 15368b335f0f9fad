"""An old import path, kept for users' code: true_on_policy.kernels.pin holds the code."""

from true_on_policy.kernels.pin import *  # noqa: F403
