"""An address that users wrote down: true_on_policy.diff.log_prob_record holds what stood here."""

from true_on_policy.diff.log_prob_record import *  # noqa: F403
