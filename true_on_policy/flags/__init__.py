"""`python -m true_on_policy flags` prints the arguments of a launch under a contract."""

from true_on_policy.flags.command import check_host as check_host
