"""An address that users wrote down: true_on_policy.diff.module_recorder holds what stood here."""

from true_on_policy.diff.module_recorder import *  # noqa: F403
