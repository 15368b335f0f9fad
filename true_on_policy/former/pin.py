"""An address that users wrote down: true_on_policy.kernels.pin holds what stood here."""

from true_on_policy.kernels.pin import *  # noqa: F403
