"""An old import path, kept for users' code: true_on_policy.contract.gpu holds the code."""

from true_on_policy.contract.gpu import *  # noqa: F403
