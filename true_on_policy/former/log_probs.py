"""An old import path, kept for users' code: true_on_policy.diff.log_prob_record holds the code."""

from true_on_policy.diff.log_prob_record import *  # noqa: F403
