"""An address that users wrote down: true_on_policy.kernels.gpu_probes holds what stood here."""

from true_on_policy.kernels.gpu_probes import *  # noqa: F403
