"""An address that users wrote down: true_on_policy.contract.gpu holds what stood here."""

from true_on_policy.contract.gpu import *  # noqa: F403
